"""Runs step plans with JAX on one device, on a thread of its own, which also is the only one that touches the pages.

Jobs for the thread come through two doors: one plan at a time, and host jobs (page copies, poisoning), which run in
order of arrival before the next step begins. So whatever was asked of the pages before a plan is done before its first
step.

A failure costs the plan that it happened in, no more: the executor serves the next one. If it cost the pages too, the
next answer says so, and no region of before is read again (`PageRegion`).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import numpy as np
from jaxtyping import Array
from numpy.typing import NDArray

from mcjax import aio
from mcjax.backends.answers import finished, post
from mcjax.backends.jax.pages import Pages, one_line
from mcjax.backends.jax.placement import Device, Place
from mcjax.backends.jax.plans import Call, Plan
from mcjax.backends.jax.programs import DevicePrograms, Geometry, Programs
from mcjax.backends.jax.tally import Tally
from mcjax.backends.jax.warm_up import warm_up_jobs
from mcjax.backends.progress import Failure, encode_failure, encode_progress
from mcjax.engine.base import Capacity, OnStep, Progress, StepPlan
from mcjax.errors import ExecutorFailed, InstanceDown
from mcjax.types import NS_PER_S, NullRecorder, Recorder

PATIENCE_S = 60.0
"""How long `close` waits for a thread that does not come back from its device: longer than most compilations."""


def _nobody() -> None:
    """Nobody waits for the job."""


Answered = Callable[[Progress | Failure, int], None]
"""`(answer, losses)`: what came of a plan, and how often the pages had been lost by then."""


@dataclass(frozen=True, slots=True, eq=False)
class _Order:
    """A plan for the thread, and whom to tell, on that thread."""

    plan: Plan
    losses: int
    """Losses of the pages that whoever made the plan knew of."""
    answered: Answered
    now_ns: Callable[[], int]
    on_step: OnStep | None


class JaxExecutor:
    """One instance's compute, on a device or a few. Implements `mcjax.engine.base.Executor`.

    A prefill item runs a prefill program by itself; all decode items of a plan share one call of a decode program; the
    two are never fused. If the geometry has one shape of each, a sequence's bits depend on nothing but its own tokens.
    """

    def __init__(
        self,
        name: str,
        programs: Programs,
        device: Device | Place,
        recorder: Recorder | None = None,
    ):
        self.name = name
        self.losses_told = 0
        """Of the losses of its pages, those that a failed plan has told of."""
        self._programs = programs
        self._device = device
        self._recorder = recorder or NullRecorder()
        self.tally = Tally()
        self._calls = 0
        self._busy_ns = 0
        self._pages = Pages(programs, device)
        self._interrupted = threading.Event()
        self._wake = threading.Condition()
        self._host_jobs: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()
        self._order: _Order | None = None
        self._under_way: _Order | None = None
        self._running = False
        self._closing = False
        self._ended = False
        self._last_words: list[Callable[[], None]] = []
        self._host_problem: Exception | None = None
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

        Raises `ValueError` for a plan that does not fit the capacity, `ConfigError` for sampler parameters that do not
        fit the programs, `ExecutorFailed` for whatever the device raised, `InstanceDown` after `close` or when the
        thread has died. If cancelled, it still waits for the step under way: the pages are the caller's again when
        this returns.
        """
        future: asyncio.Future[Progress] = asyncio.get_running_loop().create_future()
        call, clock = self._calls, cast("aio.WallClock", aio.clock())

        def deliver(answer: Progress | Failure, losses: int) -> None:
            if future.done():  # told that the instance is down; what came of it after all is nobody's
                return
            if isinstance(answer, Progress):
                self._busy_ns += int(answer.ends_ns[-1]) - answer.start_ns
                self._recorder.outcome(clock.now_ns(), self.name, call, encode_progress(answer))
                future.set_result(answer)
            else:
                self.losses_told = losses
                self._recorder.outcome(clock.now_ns(), self.name, call, encode_failure(answer))
                future.set_exception(answer)

        def tell(step: int, tokens: Sequence[int | None], end_ns: int) -> None:
            if on_step is not None and not future.done():
                on_step(step, tokens, end_ns)

        told = None if on_step is None else partial(post, clock, tell)
        self.begin(plan, max_steps, partial(post, clock, deliver), clock.wall_ns, told)
        self._calls += 1
        return await finished(future, self.interrupt)

    def begin(
        self,
        plan: StepPlan,
        max_steps: int,
        answered: Answered,
        now_ns: Callable[[], int],
        on_step: OnStep | None = None,
    ) -> None:
        """`run` for a caller without a loop: returns at once, and leaves no trace in the log. `answered` and `on_step`
        are called on the executor's thread, `answered` again if the thread was given up before; times are those of
        `now_ns()`. Raises what `run` raises before it suspends."""
        if self._running:
            raise ValueError(f"{self.name} runs one plan at a time")
        packed = Plan.of(plan, max_steps, self._programs.geometry)
        self._interrupted.clear()
        with self._wake:
            if self._closing:
                raise InstanceDown(self.name)
            self._running = True
            self._order = _Order(packed, self.losses_told, answered, now_ns, on_step)
            self._wake.notify()

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
    def block_layout(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and type of one page as it leaves the device, whatever kernels want on it."""
        return self._programs.block_shape, self._programs.block_dtype

    @property
    def block_sharding(self) -> jax.sharding.Sharding:
        """How blocks lie on the executor's devices."""
        return Place.of(self._device).blocks(self._programs.shape)

    @property
    def compile_count(self) -> int:
        """Programs compiled for this device (shared with other executors on it)."""
        return self._programs.on(self._device).count

    @property
    def losses(self) -> int:
        """How often what the pages held was lost. Thread-safe; ahead of `losses_told` until a plan has failed of it."""
        return self._pages.losses

    async def warm_up(self, prefill: bool = True, decode: bool = True) -> None:
        """Compile the programs that will be used and run each once, on the scratch page only.

        Raises `ConfigError` if the device has no room for the pages.
        """
        for _, job in warm_up_jobs(self, prefill, decode):
            await self.on_thread(job)

    async def on_thread(self, job: Callable[[], Any]) -> Any:
        """Run a host job and return what it returned, or raise what it raised, or `InstanceDown`."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        clock = aio.clock()

        def answer(value: Any, problem: Exception | None) -> None:
            if future.done():
                return
            if problem is None:
                future.set_result(value)
            else:
                future.set_exception(problem)

        def work() -> None:
            try:
                done = (job(), None)
            except Exception as problem:
                done = (None, problem)
            post(clock, answer, *done)

        self.submit_host(work, lambda: post(clock, answer, None, InstanceDown(self.name)))
        return await finished(future, lambda: None)

    def submit_host(self, job: Callable[[], None], refused: Callable[[], None] = _nobody) -> None:
        """Run `job` on the executor's thread before the next step begins, in order of submission.

        Should it raise, the plan under way or the next one fails of that. Raises `InstanceDown` after `close`; if the
        thread dies before the job's turn comes, `refused` is called instead, from whatever thread.
        """
        with self._wake:
            if self._closing:
                raise InstanceDown(self.name)
            self._host_jobs.append((job, refused))
            self._wake.notify()

    def poison(self, slots: Iterable[int]) -> None:
        """Overwrite these pages with NaN, before anything that is asked for later. Nothing to do after `close`."""
        wanted = list(slots)
        with contextlib.suppress(InstanceDown):
            self.submit_host(lambda: self._pages.poison(wanted))

    async def close(self, patience_s: float = PATIENCE_S) -> None:
        """Stop after the step under way and the host jobs already submitted, end the thread, let go of the pages.

        A thread that has not come back from its device by then is left to itself, and whoever waits for it is told.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        clock = cast("aio.WallClock", aio.clock())

        def end() -> None:
            if not future.done():
                future.set_result(None)

        if self._leave(lambda: post(clock, end)):
            timer = clock.call_at_ns(clock.wall_ns() + round(patience_s * NS_PER_S), end)
            await finished(future, lambda: None)
            timer.cancel()
        self._join(1.0 if self._ended else 0.0)  # it has said its last words, or never will

    def stop(self, patience_s: float = PATIENCE_S) -> None:
        """`close` for a caller without a running loop: blocks until the thread has ended."""
        self._leave(lambda: None)
        self._join(patience_s)

    def _leave(self, say: Callable[[], None]) -> bool:
        """Ask the thread to end; False if it has already, and will not say anything."""
        self.interrupt()
        with self._wake:
            self._closing = True
            self._wake.notify()
            if not self._ended:
                self._last_words.append(say)
            return not self._ended

    def _join(self, patience_s: float) -> None:
        self._thread.join(patience_s)
        if self._thread.is_alive():
            self._tell_all()

    # Below this line: on the executor's thread only.

    def read_pages(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        """`[n, page_bytes]`: a copy of the bytes of these pages."""
        return self._pages.read(slots)

    def write_pages(self, slots: Sequence[int], blocks: NDArray[np.uint8]) -> None:
        """Overwrite these pages with `blocks` (`[n, page_bytes]`). Returns when the bytes are on the device."""
        self._pages.write(slots, blocks)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy page to page on the device. No page may be both."""
        self._pages.copy(sources, targets)

    def gather_pages(self, slots: Sequence[int]) -> Iterator[tuple[int, Array]]:
        """Copies of these pages that stay on the device: see `Pages.gather`."""
        return self._pages.gather(slots)

    def scatter_pages(self, slots: Sequence[int], blocks: Array) -> None:
        """Overwrite pages with blocks that are on the device: see `Pages.scatter`."""
        self._pages.scatter(slots, blocks)

    def step(self, call: Call) -> NDArray[np.int32]:
        """One call of the model and its sampler, one synchronisation; `[B, 2]` of `sampling.sample`, or what
        `sampling.sample_fully` tells."""
        programs = self.programs()
        model = programs.model(call.batch, call.width)
        sampler = programs.full_sampler(call.batch) if call.full else programs.sampler(call.batch)
        with self._pages.consumed() as pages:
            logits, pages = model(programs.weights, pages, call.rows)
            self._pages.replace(pages)
            return np.asarray(sampler(logits, call.words, call.numbers))

    def steps(self, call: Call) -> NDArray[np.int32]:
        """`fused_steps` decode steps in one call of the device; `[K, B, 2]`, see `step`. For plain samplers."""
        programs = self.programs()
        fused = programs.fused(call.batch)
        with self._pages.consumed() as pages:
            picked, pages = fused(programs.weights, pages, call.rows, call.words, call.numbers)
            self._pages.replace(pages)
            return np.asarray(picked)

    def programs(self) -> DevicePrograms:
        """The programs of this executor's device."""
        return self._programs.on(self._device)

    def _work(self) -> None:
        try:
            self._serve()
        finally:  # be it that the thread dies: nobody may wait for it
            self._tell_all()

    def _serve(self) -> None:
        while True:
            with self._wake:
                while not (self._host_jobs or self._order or self._closing):
                    self._wake.wait()
                if self._closing and not (self._host_jobs or self._order):
                    self._pages.drop()
                    return
                order, self._order = self._order, None
                self._under_way = order
            if order is None:
                self._run_host_jobs()
                continue
            try:
                answer = self._run_plan(order)
            except Exception as problem:
                lost = self.losses != order.losses
                what = f"executor {self.name}: {one_line(problem)}" + ("; its pages are lost" if lost else "")
                answer = ExecutorFailed(what, lost)
            self._under_way, self._running = None, False
            order.answered(answer, self.losses)

    def _tell_all(self) -> None:
        """Whoever still waits for the thread hears that it is gone."""
        with self._wake:
            self._closing = self._ended = True
            orders = [order for order in (self._under_way, self._order) if order is not None]
            refused = [refuse for _, refuse in self._host_jobs]
            last_words, self._last_words = self._last_words, []
            self._host_jobs.clear()
            self._order = self._under_way = None
        self._running = False
        for order in orders:
            order.answered(InstanceDown(self.name), self.losses)
        for say in (*refused, *last_words):
            say()

    def _run_host_jobs(self) -> None:
        # Only those that are there now: a stream of copies must not hold up a step for ever.
        for _ in range(len(self._host_jobs)):
            with self._wake:
                if not self._host_jobs:  # the thread was given up meanwhile
                    return
                job, refused = self._host_jobs.popleft()
            try:
                job()
            except Exception as problem:  # nobody waits for this job: a plan says what went wrong
                self._host_problem = problem
            except BaseException:
                refused()
                raise

    def _run_plan(self, order: _Order) -> Progress:
        plan, now_ns, on_step = order.plan, order.now_ns, order.on_step
        ends_ns: list[int] = []
        self._prepare_step(order)
        start_ns = now_ns()
        while True:
            steps = self._compute(plan, plan.max_steps - len(ends_ns))
            end_ns = now_ns()  # of all of them: tokens of fused steps are there together
            for number, answers in enumerate(steps):
                if number > 0:
                    plan.advance()
                for call, picked in answers:
                    plan.produced(call, picked)
                self.tally.add(plan)
                ends_ns.append(end_ns)
                if on_step is not None:
                    on_step(len(ends_ns) - 1, plan.last_tokens(), end_ns)
                if plan.finished or plan.failed:  # what was computed beyond is computed again by whoever goes on
                    break
            if len(ends_ns) == plan.max_steps or plan.finished or plan.failed or self._interrupted.is_set():
                break
            plan.advance()
            self._prepare_step(order)
        return Progress(
            steps=len(ends_ns),
            start_ns=start_ns,
            ends_ns=np.array(ends_ns, dtype=np.int64),
            tokens=plan.tokens(),
            finished=tuple(sorted(plan.finished)),
            failed=dict(sorted(plan.failed.items())),
            logprobs=plan.logprobs(),
        )

    def _compute(self, plan: Plan, steps_left: int) -> list[list[tuple[Call, NDArray[np.int32]]]]:
        """The answers to the calls of the next step, or of the next few in one go."""
        together = self.geometry.fused_steps
        if 1 < together <= steps_left and plan.fusable:
            assert plan.decode is not None
            return [[(plan.decode, picked)] for picked in self.steps(plan.decode)]
        return [[(call, self.step(call)) for call in plan.calls()]]

    def _prepare_step(self, order: _Order) -> None:
        self._run_host_jobs()
        problem, self._host_problem = self._host_problem, None
        if problem is not None:
            raise problem
        if self.losses != order.losses:
            raise RuntimeError("a page copy before this step has cost what the pages held")
