"""The simulator's executor: steps take the time that the cost model says, and outputs end where the script says."""

from __future__ import annotations

import asyncio
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mcjax import aio
from mcjax.cost.base import CostModel
from mcjax.engine.base import Capacity, Kind, OnStep, Progress, StepItem, StepPlan
from mcjax.types import Script, Scripts, Tokens

NO_STEPS: NDArray[np.int64] = np.zeros(0, np.int64)


class SimExecutor:
    """Runs a macro-step as one cumulative sum and one wake-up."""

    def __init__(self, name: str, capacity: Capacity, cost: CostModel, scripts: Scripts):
        self.name = name
        self._capacity = capacity
        self._cost = cost
        self._script = lru_cache(maxsize=4 * capacity.max_batch)(scripts.script)  # of those at work: each step asks
        self._ends_ns = NO_STEPS
        self._done: asyncio.Future[None] | None = None
        self._timer: aio.Timer | None = None
        self._busy_ns = 0

    def capacity(self) -> Capacity:
        return self._capacity

    def busy_ns(self) -> int:
        return self._busy_ns

    def step_ends_ns(self) -> NDArray[np.int64]:
        return self._ends_ns

    def interrupt(self) -> None:
        """The decode step now running becomes the last one."""
        if self._done is None:
            return
        running = int(self._ends_ns.searchsorted(aio.now_ns()))
        if running + 1 < len(self._ends_ns):
            self._ends_ns = self._ends_ns[: running + 1]
            self._wake_at_last_end()

    async def run(self, plan: StepPlan, max_steps: int, on_step: OnStep | None = None) -> Progress:
        items = plan.items
        start_ns = aio.now_ns()
        scripts = [self._script(item.request_id) for item in items]
        left = [script.output_tokens - item.generated for item, script in zip(items, scripts)]
        if items[0].kind is Kind.PREFILL:
            end_ns = start_ns + self._chunk_ns(items)
            await aio.sleep_until_ns(end_ns)
            ends_ns = np.array([end_ns], np.int64)
        else:
            steps = max(1, min(max_steps, *left))
            tell = None if on_step is None else _Teller(self, on_step, self._tokens(items, scripts, steps))
            ends_ns = await self._decode(items, steps, start_ns, tell)
        steps = len(ends_ns)
        self._busy_ns += int(ends_ns[-1]) - start_ns
        finished = tuple([at for at, more in enumerate(left) if more <= steps and items[at].samples])
        return Progress(steps, start_ns, ends_ns, self._tokens(items, scripts, steps), finished)

    def _tokens(self, items: list[StepItem], scripts: list[Script], steps: int) -> list[Tokens | None]:
        tokens: list[Tokens | None] = [None] * len(items)
        for index, script in enumerate(scripts):
            item = items[index]
            if script.tokens is not None and item.samples:
                tokens[index] = script.tokens[item.generated : item.generated + steps]
        return tokens

    def _chunk_ns(self, items: list[StepItem]) -> int:
        """A step with prompt chunks: the first rides with the decodes, further ones add their own time."""
        chunks = [item for item in items if item.kind is Kind.PREFILL]
        decodes = [item for item in items if item.kind is Kind.DECODE]
        duration_ns = sum(self._cost.prefill_ns(item.start, item.q_len) for item in chunks[1:])
        if not decodes:
            return duration_ns + self._cost.prefill_ns(chunks[0].start, chunks[0].q_len)
        context = sum(item.start for item in decodes)
        return duration_ns + self._cost.mixed_ns(chunks[0].start, chunks[0].q_len, len(decodes), context)

    async def _decode(
        self, items: list[StepItem], steps: int, start_ns: int, tell: _Teller | None
    ) -> NDArray[np.int64]:
        """Wait for the last step's end, or (interrupted) for the end of the step then running."""
        context = sum([item.start for item in items])
        self._ends_ns = start_ns + self._cost.step_ns(len(items), context, steps).cumsum()
        self._done = aio.new_future()
        self._wake_at_last_end()
        if tell is not None:
            tell.next()
        try:
            await self._done
        finally:
            self._done = None
        return self._ends_ns

    def _wake_at_last_end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = aio.clock().call_at_ns(int(self._ends_ns[-1]), self._wake)

    def _wake(self) -> None:
        self._timer = None
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class _Teller:
    """Tells of the steps of a plan as they end; of the last one the answer tells."""

    def __init__(self, executor: SimExecutor, on_step: OnStep, tokens: list[Tokens | None]):
        self._executor = executor
        self._on_step = on_step
        self._tokens = tokens
        self._step = 0

    def next(self) -> None:
        """Wait for the end of a further step, if it is not the last."""
        ends_ns = self._executor.step_ends_ns()
        if self._step < len(ends_ns) - 1:
            end_ns = int(ends_ns[self._step])
            aio.clock().call_at_ns(end_ns, self._tell, end_ns)

    def _tell(self, end_ns: int) -> None:
        step, self._step = self._step, self._step + 1
        told = [None if tokens is None else int(tokens[step]) for tokens in self._tokens]
        self._on_step(step, told, end_ns)
        self.next()
