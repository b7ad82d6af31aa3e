"""The executor of a measured machine: a thread that shares its host, and whose copies wait for its steps."""

from __future__ import annotations

import asyncio

import numpy as np
from numpy.typing import NDArray

from mcjax import aio
from mcjax.backends.sim.executor import NO_STEPS, SimExecutor
from mcjax.backends.sim.host import Host, HostThread, Job
from mcjax.cost.base import CostModel
from mcjax.cost.measured import Machine, at
from mcjax.engine.base import Capacity, Kind, OnStep, Progress, StepItem, StepPlan
from mcjax.types import Scripts

PREFILL, DECODE, WAIT = "prefill", "decode", "wait"
"""Kinds of work on a host. A thread that waits to be woken slows nobody."""


class HostExecutor(SimExecutor):
    """Step by step, as the real engine's thread: a hand-off, then steps; copies that wait go between two steps.

    A decode step takes as long as its longest row. What the steps under way have done is known only with their answer.
    """

    def __init__(
        self,
        name: str,
        capacity: Capacity,
        cost: CostModel,
        scripts: Scripts,
        host: Host,
        thread: HostThread,
        machine: Machine,
        rng: np.random.Generator,
    ):
        super().__init__(name, capacity, cost, scripts)
        self._host = host
        self._thread = thread
        self._overheads = machine.overheads
        self._spread = machine.spread
        self._rng = rng
        self._interrupted = False
        self._last_end_ns = -1

    def step_ends_ns(self) -> NDArray[np.int64]:
        return NO_STEPS

    def interrupt(self) -> None:
        self._interrupted = True

    async def run(self, plan: StepPlan, max_steps: int, on_step: OnStep | None = None) -> Progress:
        items = plan.items
        scripts = [self._script(item.request_id) for item in items]
        left = [script.output_tokens - item.generated for item, script in zip(items, scripts, strict=True)]
        chunks = any(item.kind is Kind.PREFILL for item in items)
        kind = PREFILL if chunks else DECODE
        steps = 1 if chunks else max(1, min(max_steps, *left))
        durations_ns = self._durations_ns(items, steps, kind)
        handed_ns = self._hand_off_ns(chunks)
        self._interrupted = False
        start_ns = 0
        ends_ns: list[int] = []
        done: asyncio.Future[None] = aio.new_future()

        def step() -> Job:
            return Job(kind, round(durations_ns[len(ends_ns)] * self._lasting(kind)), ended)

        def begin() -> Job:
            nonlocal start_ns
            start_ns = aio.now_ns()
            return step()

        def ended() -> None:
            ends_ns.append(aio.now_ns())
            if on_step is not None:
                last = self._tokens(items, scripts, len(ends_ns))
                on_step(len(ends_ns) - 1, [None if t is None else int(t[-1]) for t in last], ends_ns[-1])
            if len(ends_ns) < steps and not self._interrupted and not done.cancelled():
                self._thread.submit(step())
            elif not done.done():
                done.set_result(None)

        self._thread.submit(Job(WAIT, handed_ns, begin))
        await done
        self._last_end_ns = ends_ns[-1]
        self._busy_ns += ends_ns[-1] - start_ns
        count = len(ends_ns)
        finished = tuple([at for at, more in enumerate(left) if more <= count and items[at].samples])
        tokens = self._tokens(items, scripts, count)
        return Progress(count, start_ns, np.array(ends_ns, np.int64), tokens, finished)

    def _hand_off_ns(self, chunks: bool) -> int:
        overheads = self._overheads
        if not chunks:
            usual_ns = overheads.decode_plan_ns
        elif aio.now_ns() == self._last_end_ns:
            usual_ns = overheads.prefill_plan_ns
        else:
            usual_ns = overheads.prefill_idle_ns
        return round(usual_ns * at(overheads.factors, float(self._rng.random())))

    def _durations_ns(self, items: list[StepItem], steps: int, kind: str) -> list[int]:
        """What each step takes on an idle host, as fast as it usually is."""
        if kind == PREFILL:
            clean_ns = np.array([self._chunk_ns(items)], np.int64)
        else:
            longest = max(item.start for item in items)
            clean_ns = self._cost.step_ns(len(items), len(items) * longest, steps)
        spread = self._spread.get(kind)
        if spread is None:
            return clean_ns.tolist()
        factors = [at(spread.fleeting, rank) for rank in self._rng.random(len(clean_ns)).tolist()]
        return np.rint(clean_ns * np.array(factors)).astype(np.int64).tolist()

    def _lasting(self, kind: str) -> float:
        spread = self._spread.get(kind)
        return 1.0 if spread is None else at(spread.lasting, self._host.rank())
