"""The virtual-time event loop: integer nanoseconds, ordered ties, no threads, and an error instead of a hang.

It runs ordinary asyncio tasks and futures. Everything ready runs first, in order; only then does time jump to the
earliest timer, one timer at a time: the same discipline as `mcjax.aio.WallClock`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import heapq
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from types import CoroutineType
from typing import Any, TypeVar, cast

from mcjax import aio
from mcjax.aio import Timer
from mcjax.errors import Deadlock

T = TypeVar("T")

_REPORTED_TASKS = 40
_CANCEL_ROUNDS = 3
"""A `finally` block may await once more, and be cancelled there in turn; who still waits then waits for time."""

_GC_THRESHOLDS = (100_000, 50, 100)
"""A run makes many objects that live long and few cycles: with the usual thresholds a third of its time goes into
looking for them."""

_logger = logging.getLogger(__name__)


class VirtualLoop:
    """A loop that is its own `mcjax.aio.Clock`. One run a loop."""

    def __init__(self) -> None:
        self.mcjax_clock = self
        self._as_asyncio = cast("asyncio.AbstractEventLoop", self)  # it has all that tasks and futures need of one
        self.current_ns = 0
        self._sequence = 0
        self._heap: list[tuple[int, int, Timer]] = []
        self._ready: deque[tuple[Callable[..., object], tuple[Any, ...], contextvars.Context | None]] = deque()
        self._running = False
        self._tasks: dict[asyncio.Task[Any], None] = {}

    # The clock

    def now_ns(self) -> int:
        return self.current_ns

    def time(self) -> float:
        return self.current_ns / 1e9

    def call_at_ns(self, when_ns: int, callback: Callable[..., object], *args: Any) -> Timer:
        if when_ns < self.current_ns:
            when_ns = self.current_ns
        timer = Timer(when_ns, callback, args)
        self._sequence += 1
        heapq.heappush(self._heap, (when_ns, self._sequence, timer))
        return timer

    def post(self, callback: Callable[..., object], *args: Any) -> None:
        raise RuntimeError("there are no other threads in virtual time; use call_at_ns")

    # What asyncio's tasks and futures need of a loop

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> None:
        self._ready.append((callback, args, context))

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> None:
        raise RuntimeError("call_soon_threadsafe: a thread would break the order of virtual time")

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Timer:
        return self.call_at_ns(self.current_ns + round(delay * 1e9), callback, *args)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Timer:
        return self.call_at_ns(round(when * 1e9), callback, *args)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self._as_asyncio)

    def create_task(
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        task: asyncio.Task[T] = asyncio.Task(coro, loop=self._as_asyncio, name=name, context=context)
        self._tasks[task] = None
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """What nobody asked for (a task's exception never retrieved) is logged, as a stock loop does."""
        problem = context.get("exception")
        _logger.error("%s: %s", context.get("message", "unhandled"), context, exc_info=problem)

    # Running

    def run(self, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `main()` to its end and return its result.

        Works inside another loop's task too, which stands still meanwhile. Tasks that are left over at the end, however
        it comes, are cancelled.

        Raises:
            Deadlock: nothing can happen any more and `main` is not done; lists who waits, and where.
        """
        with self._running_loop():
            task = self.create_task(main(), name="main")
            try:
                self._turn(task)
                return task.result()
            finally:
                self._cancel_all()
                if task.done() and not task.cancelled():
                    task.exception()  # raised already, if there is one

    @contextlib.contextmanager
    def _running_loop(self) -> Generator[None]:
        """Be the thread's running loop; the one that was (a notebook's) and its task come back afterwards."""
        if self._running:
            raise RuntimeError("this loop is already running")
        outer = asyncio._get_running_loop()  # the way for a loop's own implementation
        outer_task = None if outer is None else asyncio.current_task(outer)
        if outer is not None and outer_task is not None:
            asyncio.tasks._leave_task(outer, outer_task)
        asyncio._set_running_loop(self._as_asyncio)
        outer_clock = aio.enter(self)
        self._running = True
        thresholds = gc.get_threshold()
        gc.set_threshold(*_GC_THRESHOLDS)
        gc.freeze()
        try:
            yield
        finally:
            gc.unfreeze()
            gc.set_threshold(*thresholds)
            self._running = False
            aio.enter(outer_clock)
            asyncio._set_running_loop(outer)
            if outer is not None and outer_task is not None:
                asyncio.tasks._enter_task(outer, outer_task)

    def _drain(self) -> None:
        """Run everything that is ready, in order."""
        ready = self._ready
        while ready:
            callback, args, context = ready.popleft()
            if context is None:
                callback(*args)
            else:
                context.run(callback, *args)

    def _turn(self, main: asyncio.Task[Any], until_ns: int | None = None) -> None:
        heap, pop = self._heap, heapq.heappop
        while not main.done():
            self._drain()
            if main.done():
                return
            while heap and heap[0][2].callback is None:
                pop(heap)
            if not heap:
                raise Deadlock(self.who_waits())
            if until_ns is not None and heap[0][0] > until_ns:
                self.current_ns = until_ns
                return
            when_ns, _, timer = pop(heap)
            self.current_ns = when_ns
            callback = timer.callback
            assert callback is not None
            callback(*timer.args)

    def run_until(self, main: asyncio.Task[Any], until_ns: int) -> bool:
        """Advance to `until_ns` at most; True when `main` is done. For stepping by hand."""
        with self._running_loop():
            self._turn(main, until_ns)
        return main.done()

    def _cancel_all(self) -> None:
        """Let every task that is left run its `finally` blocks, as far as that takes no time."""
        for _ in range(_CANCEL_ROUNDS):
            if not self._tasks:
                return
            for task in list(self._tasks):
                task.cancel()
            while self._ready:
                try:
                    self._drain()
                except Exception:  # one task's trouble must not keep the others from cleaning up
                    _logger.exception("while tasks were being cancelled")

    def who_waits(self) -> str:
        """Every task that has not ended, and the chain of awaits it stands in."""
        lines = [f"at {self.current_ns / 1e9:.6f} s of virtual time these still wait:"]
        tasks = list(self._tasks)
        for task in tasks[:_REPORTED_TASKS]:
            lines.append(f"  {task.get_name()}: {_awaits(task)}")
        if len(tasks) > _REPORTED_TASKS:
            lines.append(f"  and {len(tasks) - _REPORTED_TASKS} more")
        return "\n".join(lines)


def _awaits(task: asyncio.Task[Any]) -> str:
    """The chain of awaits inside a task, outermost first."""
    places: list[str] = []
    coroutine: Any = task.get_coro()
    while isinstance(coroutine, CoroutineType):
        frame = coroutine.cr_frame
        if frame is not None:
            places.append(f"{coroutine.__qualname__}:{frame.f_lineno}")
        coroutine = coroutine.cr_await
    return " > ".join(places) or "not started"
