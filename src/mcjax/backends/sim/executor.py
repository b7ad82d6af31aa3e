"""The simulator's executor: steps take the time that the cost model says, and outputs end where the script says."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mcjax import aio
from mcjax.cost.base import CostModel
from mcjax.engine.base import Capacity, Kind, Progress, StepItem, StepPlan
from mcjax.types import Scripts, Tokens

NO_STEPS: NDArray[np.int64] = np.zeros(0, np.int64)


class SimExecutor:
    """Runs a macro-step as one cumulative sum and one wake-up."""

    def __init__(self, name: str, capacity: Capacity, cost: CostModel, scripts: Scripts):
        self.name = name
        self._capacity = capacity
        self._cost = cost
        self._scripts = scripts
        self._interrupted = aio.Signal(f"{name}.interrupt")
        self._ends_ns = NO_STEPS
        self._busy_ns = 0

    def capacity(self) -> Capacity:
        return self._capacity

    def busy_ns(self) -> int:
        return self._busy_ns

    def step_ends_ns(self) -> NDArray[np.int64]:
        return self._ends_ns

    def interrupt(self) -> None:
        self._interrupted.set()

    async def run(self, plan: StepPlan, max_steps: int) -> Progress:
        items = plan.items
        start_ns = aio.now_ns()
        if items[0].kind is Kind.PREFILL:
            ends_ns = np.array([start_ns + self._chunk_ns(items)], np.int64)
            await aio.sleep_until_ns(int(ends_ns[0]))
        else:
            ends_ns = await self._decode(items, min(max_steps, self._until_first_end(items)), start_ns)
        steps = len(ends_ns)
        self._busy_ns += int(ends_ns[-1]) - start_ns
        finished = [index for index, item in enumerate(items) if self._ends(item, steps)]
        tokens = [self._tokens(item, steps) for item in items]
        return Progress(steps, start_ns, ends_ns, tokens, tuple(finished))

    def _chunk_ns(self, items: list[StepItem]) -> int:
        """A step with prompt chunks: the first rides with the decodes, further ones add their own time."""
        chunks = [item for item in items if item.kind is Kind.PREFILL]
        decodes = [item for item in items if item.kind is Kind.DECODE]
        duration_ns = sum(self._cost.prefill_ns(item.start, item.q_len) for item in chunks[1:])
        if not decodes:
            return duration_ns + self._cost.prefill_ns(chunks[0].start, chunks[0].q_len)
        context = sum(item.start for item in decodes)
        return duration_ns + self._cost.mixed_ns(chunks[0].start, chunks[0].q_len, len(decodes), context)

    async def _decode(self, items: list[StepItem], steps: int, start_ns: int) -> NDArray[np.int64]:
        """Sleep until the last step's end, or (interrupted) until the end of the step then running."""
        context = sum(item.start for item in items)
        ends_ns = start_ns + np.cumsum(self._cost.step_ns(len(items), context, steps))
        self._interrupted.clear()
        self._ends_ns = ends_ns
        if await self._interrupted.wait(int(ends_ns[-1])):
            running = int(np.searchsorted(ends_ns, aio.now_ns()))
            self._ends_ns = ends_ns = ends_ns[: running + 1]
            await aio.sleep_until_ns(int(ends_ns[-1]))
        return ends_ns

    def _until_first_end(self, items: list[StepItem]) -> int:
        script = self._scripts.script
        return max(1, min(script(item.request_id).output_tokens - item.generated for item in items))

    def _ends(self, item: StepItem, steps: int) -> bool:
        return item.samples and item.generated + steps >= self._scripts.script(item.request_id).output_tokens

    def _tokens(self, item: StepItem, steps: int) -> Tokens | None:
        if not item.samples:
            return None
        tokens = self._scripts.script(item.request_id).tokens
        return None if tokens is None else tokens[item.generated : item.generated + steps]
