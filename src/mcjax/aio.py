"""Time and waiting, the same in every world.

Procedures take time only from here. A *clock* belongs to the running event loop: `backends.virtual.VirtualLoop` is its
own clock; on a stock loop `WallClock` keeps an ordered timer heap on one stock timer. On both, the world is a sequence
of *wake-ups* (a timer, or a mechanism's answer) in order of (time, sequence); before the next wake-up is looked at,
everything that the last one made runnable has run, and `now_ns()` stands still meanwhile. So a run is a function of its
wake-ups, and a real run whose wake-ups were logged can be repeated in virtual time, decision by decision.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any, Protocol, TypeVar, cast

from mcjax.errors import DeadlineExceeded

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


def _set_result(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


async def sleep_until_ns(when_ns: int) -> None:
    """Return at `when_ns`, or at once (after one wake-up) if that is past."""
    future: asyncio.Future[None] = new_future()
    timer = clock().call_at_ns(when_ns, _set_result, future, None)
    try:
        await future
    finally:
        timer.cancel()


async def sleep_ns(duration_ns: int) -> None:
    await sleep_until_ns(clock().now_ns() + duration_ns)


class Signal:
    """A flag that one waiter at a time awaits, with an optional time to give up: one future for both."""

    __slots__ = ("_future", "_raised", "name")

    def __init__(self, name: str = ""):
        self.name = name
        self._raised = False
        self._future: asyncio.Future[bool] | None = None

    def set(self) -> None:
        """Raise the flag; a waiter takes it down again as it wakes."""
        self._raised = True
        if self._future is not None and not self._future.done():
            self._future.set_result(True)

    def clear(self) -> None:
        self._raised = False

    async def wait(self, until_ns: int | None = None) -> bool:
        """True when the flag was raised, False when `until_ns` came first."""
        if self._future is not None and not self._future.done():
            raise RuntimeError(f"signal {self.name!r} has a waiter already")
        if self._raised:
            self._raised = False
            return True
        future: asyncio.Future[bool] = new_future()
        self._future = future
        timer = None if until_ns is None else clock().call_at_ns(until_ns, _set_result, future, False)
        try:
            woken = await future
        finally:
            if self._future is future:  # a waiter that was cancelled may find that the next one has come already
                self._future = None
            if timer is not None:
                timer.cancel()
        if woken:
            self._raised = False
        return woken


class WaitQueue:
    """Waiters in order of arrival; each waits until its own condition holds and everyone before it has gone."""

    def __init__(self, name: str = ""):
        self.name = name
        self._waiters: deque[tuple[Callable[[], bool], asyncio.Future[bool]]] = deque()

    async def until(self, condition: Callable[[], bool], deadline_ns: int | None = None) -> bool:
        """True once `condition()` held (it may take what it found: it succeeds once), False when time ran out."""
        if not self._waiters and condition():
            return True
        future: asyncio.Future[bool] = new_future()
        entry = (condition, future)
        self._waiters.append(entry)
        timer = None if deadline_ns is None else clock().call_at_ns(deadline_ns, _set_result, future, False)
        try:
            return await future
        finally:
            if timer is not None:
                timer.cancel()
            if entry in self._waiters:
                self._waiters.remove(entry)
                self.notify()

    def notify(self) -> None:
        """Something changed: let those through whose turn and condition have come."""
        while self._waiters:
            condition, future = self._waiters[0]
            if future.done():
                self._waiters.popleft()
                continue
            try:
                if not condition():
                    return
            except Exception as problem:  # the waiter's problem, not that of whoever changed something
                future.set_exception(problem)
            else:
                future.set_result(True)
            self._waiters.popleft()

    def __len__(self) -> int:
        return len(self._waiters)


async def within(deadline_ns: int, future: asyncio.Future[T]) -> T:
    """The future's result, or `DeadlineExceeded` at `deadline_ns`. The future itself is left as it is."""
    if not future.done():
        waiter: asyncio.Future[None] = new_future()

        def wake(_: object) -> None:
            _set_result(waiter, None)

        timer = clock().call_at_ns(deadline_ns, wake, None)
        future.add_done_callback(wake)
        try:
            await waiter
        finally:
            timer.cancel()
            future.remove_done_callback(wake)
        if not future.done():
            raise DeadlineExceeded(f"nothing by {deadline_ns / 1e9:.6f} s")
    return future.result()


class Deadlines:
    """Waiters of one loop that are all given the same time: at most one timer is pending for them, not one each.

    Most are woken long before; those are passed over when the timer comes up, so who is in time costs nothing.
    """

    def __init__(self, patience_ns: int):
        self.patience_ns = patience_ns
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._timer: Timer | None = None
        self._clock: Clock | None = None

    def waiter(self) -> asyncio.Future[None]:
        """A future that is woken when its time is up, if nobody has by then; who awaits it looks which it was."""
        running, waiting = self._clock, self._waiting
        if running is None:
            running = self._clock = clock()
        while waiting and waiting[0][1].done():
            waiting.popleft()
        waiter: asyncio.Future[None] = running.create_future()
        due_ns = running.now_ns() + self.patience_ns
        waiting.append((due_ns, waiter))
        if self._timer is None:
            self._timer = running.call_at_ns(due_ns, self._come_up, False)
        return waiter

    def _come_up(self, is_last_call: bool) -> None:
        self._timer = None
        waiting, running = self._waiting, clock()
        while waiting:
            due_ns, waiter = waiting[0]
            if not waiter.done():
                is_due = due_ns <= running.now_ns()
                if not (is_due and is_last_call):
                    # When it is due, once more in the same instant: an answer that comes in it is in time.
                    self._timer = running.call_at_ns(due_ns, self._come_up, is_due)
                    return
                waiter.set_result(None)
            waiting.popleft()


async def first_of(futures: Sequence[asyncio.Future[Any]]) -> int:
    """Index of the future that is done first (the lowest, if several already are). None of them is cancelled."""
    for index, future in enumerate(futures):
        if future.done():
            return index
    waiter: asyncio.Future[int] = new_future()

    def waker(index: int) -> Callable[[asyncio.Future[Any]], None]:
        return lambda _: _set_result(waiter, index)

    wakers = [waker(index) for index in range(len(futures))]
    for future, wake in zip(futures, wakers, strict=True):
        future.add_done_callback(wake)
    try:
        return await waiter
    finally:
        for future, wake in zip(futures, wakers, strict=True):
            future.remove_done_callback(wake)


async def unless(
    gone: asyncio.Future[Any],
    problem: Callable[[], Exception],
    procedure: Coroutine[Any, Any, T],
    discard: Callable[[T], None] = lambda result: None,
) -> T:
    """The result of `procedure`, run in the caller's own task; or `problem()`, as soon as `gone` is done.

    The procedure is then cancelled, and has ended when this raises; a result that it gives all the same goes to
    `discard`.
    """
    if gone.done():
        procedure.close()
        raise problem()
    task = asyncio.current_task()
    assert task is not None
    inside, interrupted = True, False

    def interrupt(_: object) -> None:
        nonlocal interrupted
        if inside:
            interrupted = True
            task.cancel()

    gone.add_done_callback(interrupt)
    try:
        result = await procedure
        if interrupted:
            discard(result)
    except BaseException as error:
        # Whoever cancels the task as well is to be obeyed: then more than our own cancellation is left.
        if interrupted and (not isinstance(error, asyncio.CancelledError) or task.cancelling() == 1):
            raise problem() from None
        raise
    else:
        if interrupted:
            raise problem()
        return result
    finally:
        inside = False
        gone.remove_done_callback(interrupt)
        if interrupted:
            task.uncancel()


def spawn(coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """A task whose owner must await or cancel it; see `Scope` for tasks that live as long as something else."""
    return clock().create_task(coroutine, name=name)


async def settle(task: asyncio.Task[Any]) -> None:
    """Cancel `task` if it still runs and wait until it has really ended; its own outcome is of no interest any more."""
    if not task.done():
        task.cancel()
    obeyed: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await _Done(task)
        except asyncio.CancelledError as cancelled:
            # Our own cancellation must not leave the child running: remember it, finish the job, then obey.
            obeyed = cancelled
    if not task.cancelled():
        task.exception()
    if obeyed is not None:
        raise obeyed


class _Done(Awaitable[None]):
    """Awaits a future's end without taking its result or cancelling it."""

    def __init__(self, future: asyncio.Future[Any]):
        self._future = future

    def __await__(self) -> Generator[Any, None, None]:
        waiter: asyncio.Future[None] = new_future()

        def wake(_: object) -> None:
            _set_result(waiter, None)

        self._future.add_done_callback(wake)
        try:
            yield from waiter.__await__()
        finally:
            self._future.remove_done_callback(wake)


class Scope:
    """Tasks that live inside a block: cancelled and awaited, in the order they were spawned, when it ends.

    A child that fails ends the block: the failure is raised where the block waits (`run`), or at its end. A
    cancellation that arrives while the block ends is obeyed once every child has ended.
    """

    def __init__(self, name: str):
        self.name = name
        self._children: dict[asyncio.Task[Any], None] = {}
        self._failed: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Scope:
        self._failed = new_future()
        return self

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = spawn(coroutine, name)
        self._children[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._children.pop(task, None)
        if task.cancelled() or self._failed is None or self._failed.done():
            return
        problem = task.exception()
        if problem is not None:
            self._failed.set_exception(problem)

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` to its end, unless a child of the scope fails first: then raise that failure."""
        assert self._failed is not None
        task = spawn(coroutine, f"{self.name}.body")
        try:
            await first_of([self._failed, task])
            if self._failed.done():
                await settle(task)
                self._failed.result()
            return task.result()
        finally:
            if not task.done():
                await settle(task)

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        obeyed: asyncio.CancelledError | None = None
        while self._children:  # cleaning up may spawn more
            task = next(iter(self._children))
            try:
                await settle(task)
            except asyncio.CancelledError as cancelled:
                obeyed = cancelled
            self._ended(task)
        assert self._failed is not None
        failure = self._failed.exception() if self._failed.done() else None
        if obeyed is not None:
            raise obeyed
        if failure is not None and error is None:
            raise failure
