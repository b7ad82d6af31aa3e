"""Runs step plans with JAX on one device, on a thread of its own, which also is the only one that touches the pages.

Jobs for the thread come through two doors: one plan at a time, and host jobs (page copies, poisoning), which run in
order of arrival before the next step begins. So whatever was asked of the pages before a plan is done before its first
step.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import jax
import numpy as np
from numpy.typing import NDArray

from mcjax import aio
from mcjax.backends.jax.plans import Call, Plan
from mcjax.backends.jax.programs import Device, DevicePrograms, Geometry, Programs
from mcjax.backends.progress import encode_failure, encode_progress
from mcjax.engine.base import Capacity, OnStep, Progress, StepPlan
from mcjax.errors import ConfigError, InstanceDown
from mcjax.types import NullRecorder, Recorder


class JaxExecutor:
    """One instance's compute. Implements `mcjax.engine.base.Executor` with `numerics=invariant`.

    A prefill item runs the prefill program by itself; all decode items of a plan share one call of the decode program;
    the two are never fused. So a sequence's bits depend on nothing but its own tokens.
    """

    def __init__(
        self,
        name: str,
        programs: Programs,
        device: Device,
        recorder: Recorder | None = None,
        numerics: str = "invariant",
    ):
        if numerics != "invariant":
            raise ConfigError("backend.numerics", numerics, "not supported", ("invariant",))
        self.name = name
        self._programs = programs
        self._device = device
        self._recorder = recorder or NullRecorder()
        self._calls = 0
        self._busy_ns = 0
        self._pages: jax.Array | None = None
        self._interrupted = threading.Event()
        self._wake = threading.Condition()
        self._host_jobs: deque[Callable[[], None]] = deque()
        self._plan: tuple[Plan, Callable[[Progress | BaseException], None], aio.WallClock, OnStep | None] | None = None
        self._running = False
        self._closing = False
        self._last_words: list[Callable[[], None]] = []
        self._broken: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=f"mcjax-{name}", daemon=True)
        self._thread.start()

    def capacity(self) -> Capacity:
        """The sizes that the programs were compiled for."""
        geometry = self._programs.geometry
        return Capacity(
            pages=geometry.pages,
            page_tokens=geometry.page_tokens,
            page_bytes=self._programs.page_bytes,
            max_batch=geometry.max_batch,
            chunk_tokens=geometry.chunk_tokens,
            max_context_tokens=geometry.max_context_tokens,
        )

    async def run(self, plan: StepPlan, max_steps: int, on_step: OnStep | None = None) -> Progress:
        """Run the plan: one step if it holds a prefill item, else up to `max_steps`. At least one step is done.

        `item.tokens` holds the `q_len` tokens to feed, then those already known to follow (`forced` of them): step k
        feeds `tokens[k : k + q_len]`, or the last token produced once those are used up, and produces
        `tokens[k + q_len]`, or a sampled token where there is none. The plan is read before this first suspends.

        Raises `ValueError` for a plan that does not fit the capacity, `InstanceDown` after `close`, and whatever the
        device raised. If cancelled, it still waits for the step under way: the pages are the caller's again when this
        returns.
        """
        if self._closing:
            raise InstanceDown(self.name)
        if self._running:
            raise ValueError(f"{self.name} runs one plan at a time")
        packed = Plan.of(plan, max_steps, self._programs.geometry)
        future: asyncio.Future[Progress] = asyncio.get_running_loop().create_future()
        call, self._calls = self._calls, self._calls + 1
        clock = cast("aio.WallClock", aio.clock())

        def deliver(answer: Progress | BaseException) -> None:
            self._running = False
            if isinstance(answer, Progress):
                self._busy_ns += int(answer.ends_ns[-1]) - answer.start_ns
                self._recorder.outcome(clock.now_ns(), self.name, call, encode_progress(answer))
                future.set_result(answer)
            else:
                self._recorder.outcome(clock.now_ns(), self.name, call, encode_failure(answer))
                future.set_exception(answer)

        self._interrupted.clear()
        self._running = True
        with self._wake:
            self._plan = (packed, deliver, clock, on_step)
            self._wake.notify()
        return await _finished(future, self.interrupt)

    def interrupt(self) -> None:
        """Stop at the next step boundary. Does nothing when idle."""
        if self._running:
            self._interrupted.set()

    def step_ends_ns(self) -> NDArray[np.int64]:
        """None: what the thread has done is only known, and logged, with its answer."""
        return np.zeros(0, np.int64)

    def busy_ns(self) -> int:
        """Time between first start and last end of the plans that have answered."""
        return self._busy_ns

    @property
    def geometry(self) -> Geometry:
        """The fixed sizes of this executor's programs."""
        return self._programs.geometry

    @property
    def compile_count(self) -> int:
        """Programs compiled for this device (shared with other executors on it)."""
        return self._programs.on(self._device).count

    async def warm_up(self, prefill: bool = True, decode: bool = True) -> None:
        """Compile the programs that will be used and run each once, on the scratch page only."""

        def job() -> None:
            geometry = self.geometry
            if prefill:
                self.step(Plan.idle(geometry, 1, geometry.chunk_tokens))
            if decode:
                self.step(Plan.idle(geometry, geometry.max_batch, 1))
            self.write_pages([geometry.pages], self.read_pages([geometry.pages]))

        await self.on_thread(job)

    async def on_thread(self, job: Callable[[], Any]) -> Any:
        """Run a host job and return what it returned, or raise what it raised."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        clock = aio.clock()

        def work() -> None:
            try:
                done = (future.set_result, job())
            except Exception as problem:
                done = (future.set_exception, problem)
            _post(clock, *done)

        self.submit_host(work)
        return await _finished(future, lambda: None)

    def submit_host(self, job: Callable[[], None]) -> None:
        """Run `job` on the executor's thread before the next step begins, in order of submission.

        Should it raise, the executor is broken: every later plan raises that. Raises `InstanceDown` after `close`.
        """
        with self._wake:
            if self._closing:
                raise InstanceDown(self.name)
            self._host_jobs.append(job)
            self._wake.notify()

    def poison(self, slots: Iterable[int]) -> None:
        """Overwrite these pages with NaN, before anything that is asked for later. Nothing to do after `close`."""
        wanted = list(slots)
        with contextlib.suppress(InstanceDown):
            self.submit_host(lambda: self._poison(wanted))

    async def close(self) -> None:
        """Stop after the step under way and the host jobs already submitted, end the thread, let go of the pages."""
        if self._thread.is_alive():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            clock = aio.clock()
            self.interrupt()
            with self._wake:
                self._closing = True
                self._last_words.append(lambda: _post(clock, future.set_result, None))
                self._wake.notify()
            await _finished(future, lambda: None)
        self._thread.join()

    def stop(self) -> None:
        """`close` for a caller without a running loop: blocks until the thread has ended."""
        self.interrupt()
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    # Below this line: on the executor's thread only.

    def read_pages(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        """`[n, page_bytes]`: a copy of the bytes of these pages."""
        wide = self._programs.geometry.move_pages
        blocks = np.empty((len(slots), self._programs.page_bytes), dtype=np.uint8)
        for first in range(0, len(slots), wide):
            part = slots[first : first + wide]
            gathered = np.asarray(self.programs().gather(self._held(), self._padded(part)))
            blocks[first : first + len(part)] = gathered[: len(part)].reshape(len(part), -1).view(np.uint8)
        return blocks

    def write_pages(self, slots: Sequence[int], blocks: NDArray[np.uint8]) -> None:
        """Overwrite these pages with `blocks` (`[n, page_bytes]`). Returns when the bytes are on the device."""
        programs = self._programs
        wide = programs.geometry.move_pages
        for first in range(0, len(slots), wide):
            part = slots[first : first + wide]
            staged = np.zeros((wide, *programs.page_shape), dtype=programs.dtype)
            staged.reshape(wide, -1).view(np.uint8)[: len(part)] = blocks[first : first + len(part)]
            self._pages = self.programs().scatter(self._held(), self._padded(part), staged)
        # The device may read the staged buffer in place: nothing may be reused before it is done.
        jax.block_until_ready(self._pages)

    def step(self, call: Call) -> NDArray[np.int32]:
        """One call of the model and its sampler, one synchronisation; `[B, 2]`, see `sampling.sample`."""
        programs = self.programs()
        logits, self._pages = programs.model(call.batch, call.width)(programs.weights, self._held(), call.rows)
        return np.asarray(programs.sampler(call.batch)(logits, call.words, call.temperatures))

    def programs(self) -> DevicePrograms:
        """The programs of this executor's device."""
        return self._programs.on(self._device)

    def _held(self) -> jax.Array:
        if self._pages is None:
            self._pages = self._programs.new_pages(self._device)
        return self._pages

    def _padded(self, slots: Sequence[int]) -> NDArray[np.int32]:
        geometry = self._programs.geometry
        padded = np.full(geometry.move_pages, geometry.pages, dtype=np.int32)
        padded[: len(slots)] = slots
        return padded

    def _poison(self, slots: list[int]) -> None:
        nan = np.full((len(slots), *self._programs.page_shape), np.nan, dtype=self._programs.dtype)
        self.write_pages(slots, nan.reshape(len(slots), -1).view(np.uint8))

    def _work(self) -> None:
        while True:
            with self._wake:
                while not (self._host_jobs or self._plan or self._closing):
                    self._wake.wait()
                if self._closing and not (self._host_jobs or self._plan):
                    self._pages = None
                    for say in self._last_words:
                        say()
                    return
                job, self._plan = self._plan, None
            if job is None:
                self._run_host_jobs()
                continue
            plan, deliver, clock, on_step = job
            try:
                answer = self._run_plan(plan, clock, on_step)
            except Exception as problem:
                answer = problem
            _post(clock, deliver, answer)

    def _run_host_jobs(self) -> None:
        # Only those that are there now: a stream of copies must not hold up a step for ever.
        for _ in range(len(self._host_jobs)):
            try:
                self._host_jobs.popleft()()
            except Exception as problem:  # nobody waits for this job: the next plan says what went wrong
                self._broken = problem

    def _run_plan(self, plan: Plan, clock: aio.WallClock, on_step: OnStep | None) -> Progress:
        self._run_host_jobs()
        if self._broken is not None:
            raise self._broken
        ends_ns: list[int] = []
        start_ns = clock.wall_ns()
        while True:
            for call in plan.calls():
                plan.produced(call.indices, self.step(call))
            ends_ns.append(clock.wall_ns())
            if on_step is not None:
                _post(clock, on_step, len(ends_ns) - 1, plan.last_tokens(), ends_ns[-1])
            if len(ends_ns) == plan.max_steps or plan.finished or plan.failed or self._interrupted.is_set():
                break
            plan.advance()
            self._run_host_jobs()
        return Progress(
            steps=len(ends_ns),
            start_ns=start_ns,
            ends_ns=np.array(ends_ns, dtype=np.int64),
            tokens=plan.tokens(),
            finished=tuple(sorted(plan.finished)),
            failed=dict(sorted(plan.failed.items())),
        )


def _post(clock: aio.Clock, callback: Callable[..., object], *args: Any) -> None:
    # A closed loop refuses the post: then nobody is left to be told.
    with contextlib.suppress(RuntimeError):
        clock.post(callback, *args)


async def _finished(future: asyncio.Future[Any], hurry: Callable[[], None]) -> Any:
    """The future's result. Cancelling does not leave early: `hurry()` is called, and the end awaited, first."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await aio.first_of([future])
        except asyncio.CancelledError as request:
            cancelled = request
            hurry()
    if cancelled is not None:
        future.exception()
        raise cancelled
    return future.result()
