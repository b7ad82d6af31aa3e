"""The clock of a loop: integer time, ordered timers, and one gate for whatever wakes procedures up."""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar, cast

T = TypeVar("T")


class Timer:
    """A callback due at `when_ns`. Cancelling only marks it; the heap drops it when it comes up."""

    __slots__ = ("args", "callback", "when_ns")

    def __init__(self, when_ns: int, callback: Callable[..., object] | None, args: tuple[Any, ...]):
        self.when_ns = when_ns
        self.callback = callback
        self.args = args

    def cancel(self) -> None:
        self.callback = None
        self.args = ()


class Clock(Protocol):
    """What a loop must offer: integer time, ordered timers, and a door for answers from other threads."""

    current_ns: int
    """The time of the wake-up that is being served."""

    def now_ns(self) -> int: ...

    def call_at_ns(self, when_ns: int, callback: Callable[..., object], *args: Any) -> Timer: ...

    def call_soon(self, callback: Callable[..., object], *args: Any) -> object: ...

    def create_future(self) -> asyncio.Future[Any]: ...

    def create_task(self, coro: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]: ...

    def post(self, callback: Callable[..., object], *args: Any) -> None:
        """Thread-safe: `callback(*args)` becomes a wake-up stamped with the time of this call."""
        ...


class WallClock:
    """Real time on a stock asyncio loop, in the discipline of the virtual one.

    Timers and posted answers go through one ordered gate: one wake-up at a time, earliest first, and only when the loop
    has nothing else to run. A loop that hides its ready queue (uvloop) still works; only exact replay is then not
    promised.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._origin_ns = time.monotonic_ns()
        self.current_ns = 0
        self._heap: list[tuple[int, int, Timer]] = []
        self._sequence = 0
        self._inbox: deque[tuple[int, Callable[..., object], tuple[Any, ...]]] = deque()
        self._lock = threading.Lock()
        self._gate_pending = False
        self._stock_timer: asyncio.TimerHandle | None = None
        self._ready = cast("Sequence[Any]", getattr(loop, "_ready", ()))
        self.call_soon = loop.call_soon
        self.create_future = loop.create_future
        self.create_task = loop.create_task

    def now_ns(self) -> int:
        return self.current_ns

    @property
    def origin_ns(self) -> int:
        """When the clock began, on the machine's monotonic clock: what another process reckons its times from."""
        return self._origin_ns

    def wall_ns(self) -> int:
        """Real time since the clock began; for measuring mechanisms, never for decisions."""
        return time.monotonic_ns() - self._origin_ns

    def restart(self) -> None:
        """Make this instant time zero. Only while nothing waits for the clock."""
        self._forget_cancelled()
        if self._heap or self._inbox:
            raise RuntimeError("the clock can only be restarted while nobody waits for it")
        self._origin_ns = time.monotonic_ns()
        self.current_ns = 0

    def call_at_ns(self, when_ns: int, callback: Callable[..., object], *args: Any) -> Timer:
        timer = Timer(max(when_ns, self.current_ns), callback, args)
        self._sequence += 1
        heapq.heappush(self._heap, (timer.when_ns, self._sequence, timer))
        if self._heap[0][2] is timer:
            self._arm()
        return timer

    def post(self, callback: Callable[..., object], *args: Any) -> None:
        with self._lock:
            self._inbox.append((self.wall_ns(), callback, args))
        self._loop.call_soon_threadsafe(self._open_gate)

    def _forget_cancelled(self) -> None:
        while self._heap and self._heap[0][2].callback is None:
            heapq.heappop(self._heap)

    def _arm(self) -> None:
        if self._gate_pending:
            return
        self._forget_cancelled()
        if self._stock_timer is not None:
            self._stock_timer.cancel()
            self._stock_timer = None
        if self._heap:
            delay_s = max(0.0, (self._heap[0][0] - self.wall_ns()) / 1e9)
            self._stock_timer = self._loop.call_later(delay_s, self._open_gate)

    def _open_gate(self) -> None:
        if not self._gate_pending:
            self._gate_pending = True
            self._loop.call_soon(self._gate)

    def _gate(self) -> None:
        if self._ready:  # somebody is still running on the last wake-up
            self._loop.call_soon(self._gate)
            return
        self._forget_cancelled()
        # Under the lock, so that no answer with an earlier stamp can still be on its way into the inbox.
        with self._lock:
            timer_due_ns = self._heap[0][0] if self._heap and self._heap[0][0] <= self.wall_ns() else None
            posted = None
            if self._inbox and (timer_due_ns is None or self._inbox[0][0] < timer_due_ns):
                posted = self._inbox.popleft()
        if posted is not None:
            when_ns, callback, args = posted
        elif timer_due_ns is not None:
            when_ns, _, timer = heapq.heappop(self._heap)
            callback, args = cast("Callable[..., object]", timer.callback), timer.args
        else:
            self._gate_pending = False
            self._arm()
            return
        self.current_ns = max(self.current_ns, when_ns)
        self._loop.call_soon(self._gate)
        callback(*args)


_here = threading.local()
"""Holds, of a thread whose loop is its own clock, that clock. Asking asyncio for the loop may cost a system call,
and procedures ask for the time a hundred times a request."""


def enter(clock: Clock | None) -> Clock | None:
    """`clock` is this thread's from now on; returns what was. Loops that are their own clock call it as they start and
    end."""
    before: Clock | None = getattr(_here, "clock", None)
    _here.clock = clock
    return before


def clock() -> Clock:
    """The running loop's clock, made at first use on a stock loop."""
    own: Clock | None = getattr(_here, "clock", None)
    if own is not None:
        return own
    loop = cast("_LoopWithClock", asyncio.get_running_loop())
    try:
        return loop.mcjax_clock
    except AttributeError:
        loop.mcjax_clock = WallClock(asyncio.get_running_loop())
        return loop.mcjax_clock


class _LoopWithClock(Protocol):
    mcjax_clock: Clock


def now_ns() -> int:
    try:
        return _here.clock.current_ns  # the shortest way: this is asked more often than anything else
    except AttributeError:
        return clock().current_ns


def new_future() -> asyncio.Future[Any]:
    """A future of the running loop."""
    return clock().create_future()


def start_of_run() -> None:
    """Preparation is over: in real time, the run's time begins now."""
    running = clock()
    if isinstance(running, WallClock):
        running.restart()
