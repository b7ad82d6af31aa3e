"""An instance's compute as the controller sees it: plans go to the worker, progress comes back."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mcjax import aio
from mcjax.backends.answers import finished, post
from mcjax.backends.processes.channel import Channel
from mcjax.backends.processes.frames import Message
from mcjax.backends.processes.plans import encode_plan
from mcjax.backends.progress import Failure, decode_progress, encode_failure
from mcjax.engine.base import Capacity, OnStep, Progress, StepPlan
from mcjax.errors import ExecutorFailed, InstanceDown
from mcjax.types import Recorder


class RemoteExecutor:
    """Implements `mcjax.engine.base.Executor` for an instance in another process.

    Answers are recorded as those of an executor in this process are, and their times are those of this run's clock,
    which the order tells: both processes read the machine's monotonic clock.
    """

    def __init__(self, name: str, channel: Channel, capacity: Capacity, recorder: Recorder):
        self.name = name
        self._channel = channel
        self._capacity = capacity
        self._recorder = recorder
        self._calls = 0
        self._busy_ns = 0
        self.overheads_ns = array("q")
        """Of each plan: how much longer it took to be answered than its steps took."""
        self._order: int | None = None

    def capacity(self) -> Capacity:
        return self._capacity

    async def run(self, plan: StepPlan, max_steps: int, on_step: OnStep | None = None) -> Progress:
        """See `Executor.run`. The plan is read before this first suspends.

        Raises `ExecutorFailed` for whatever the worker's executor raised, `InstanceDown` when the worker is gone. If
        cancelled, it still waits for the step under way.
        """
        if self._order is not None:
            raise ValueError(f"{self.name} runs one plan at a time")
        future: asyncio.Future[Progress] = asyncio.get_running_loop().create_future()
        call, clock = self._calls, cast("aio.WallClock", aio.clock())

        def deliver(answer: Progress | Failure, payload: dict[str, Any], took_ns: int) -> None:
            self._order = None
            self._recorder.outcome(clock.now_ns(), self.name, call, payload)
            if isinstance(answer, Progress):
                busy_ns = int(answer.ends_ns[-1]) - answer.start_ns
                self._busy_ns += busy_ns
                self.overheads_ns.append(took_ns - busy_ns)
                future.set_result(answer)
            else:
                future.set_exception(answer)

        def answered(message: Message | None) -> None:
            payload = encode_failure(InstanceDown(self.name)) if message is None else dict(message.values["answer"])
            try:
                answer: Progress | Failure = decode_progress(payload)
            except (ExecutorFailed, InstanceDown) as problem:
                answer = problem
            post(clock, deliver, answer, payload, clock.wall_ns() - asked_ns)

        def tell(message: Message | None) -> None:
            if message is not None and on_step is not None:
                post(clock, _told, future, on_step, message)

        asked_ns = clock.wall_ns()
        items, buffers = encode_plan(plan)
        values = {
            "max_steps": max_steps,
            "items": items,
            "origin_ns": clock.origin_ns,
            "steps": on_step is not None,
        }
        self._calls += 1
        self._order = self._channel.ask("run", values, answered, buffers, tell)
        return await finished(future, self.interrupt)

    def interrupt(self) -> None:
        """Stop at the next step boundary. Does nothing when idle."""
        if self._order is not None:
            self._channel.send("interrupt", {"run": self._order})

    def step_ends_ns(self) -> NDArray[np.int64]:
        """None: what the worker has done is only known, and logged, with its answer."""
        return np.zeros(0, np.int64)

    def busy_ns(self) -> int:
        """Time between first start and last end of the plans that have answered."""
        return self._busy_ns


def _told(future: asyncio.Future[Progress], on_step: OnStep, message: Message) -> None:
    if not future.done():
        on_step(message.values["step"], message.values["tokens"], message.values["end_ns"])
