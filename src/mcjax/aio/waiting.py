"""Waiting: for a time, a flag, a turn, or whichever of several comes first. Cancel-safe and ordered."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mcjax.aio.clock import Clock, Timer, clock, new_future
from mcjax.errors import DeadlineExceeded

T = TypeVar("T")


def set_result(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


async def sleep_until_ns(when_ns: int) -> None:
    """Return at `when_ns`, or at once (after one wake-up) if that is past."""
    future: asyncio.Future[None] = new_future()
    timer = clock().call_at_ns(when_ns, set_result, future, None)
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
        timer = None if until_ns is None else clock().call_at_ns(until_ns, set_result, future, False)
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
    """Waiters in order of arrival; each waits until its own condition holds and everyone before it has gone.

    A condition that is None, not False, waits for something that nobody behind it wants, and lets them by.
    """

    def __init__(self, name: str = ""):
        self.name = name
        self._waiters: deque[tuple[Callable[[], bool | None], asyncio.Future[bool]]] = deque()
        self._blocked = False
        """Whether somebody who waits lets nobody by, as of the last look."""

    async def until(self, condition: Callable[[], bool | None], deadline_ns: int | None = None) -> bool:
        """True once `condition()` held (it may take what it found: it succeeds once), False when time ran out."""
        if not self._waiters or not self._blocked:
            met = condition()
            if met:
                return True
            self._blocked = met is not None
        future: asyncio.Future[bool] = new_future()
        entry = (condition, future)
        self._waiters.append(entry)
        timer = None if deadline_ns is None else clock().call_at_ns(deadline_ns, set_result, future, False)
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
        passed: list[tuple[Callable[[], bool | None], asyncio.Future[bool]]] = []
        self._blocked = self._tried(passed)
        self._waiters.extendleft(reversed(passed))

    def _tried(self, passed: list[tuple[Callable[[], bool | None], asyncio.Future[bool]]]) -> bool:
        """Whether somebody lets nobody by. Who lets others by is moved to `passed`."""
        while self._waiters:
            condition, future = self._waiters[0]
            if future.done():
                self._waiters.popleft()
                continue
            try:
                met = condition()
                if met is None:
                    passed.append(self._waiters.popleft())
                    continue
                if not met:
                    return True
            except Exception as problem:  # the waiter's problem, not that of whoever changed something
                future.set_exception(problem)
            else:
                future.set_result(True)
            self._waiters.popleft()
        return False

    def __len__(self) -> int:
        return len(self._waiters)


async def within(deadline_ns: int, future: asyncio.Future[T]) -> T:
    """The future's result, or `DeadlineExceeded` at `deadline_ns`. The future itself is left as it is."""
    if not future.done():
        waiter: asyncio.Future[None] = new_future()

        def wake(_: object) -> None:
            set_result(waiter, None)

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
        return lambda _: set_result(waiter, index)

    wakers = [waker(index) for index in range(len(futures))]
    for future, wake in zip(futures, wakers, strict=True):
        future.add_done_callback(wake)
    try:
        return await waiter
    finally:
        for future, wake in zip(futures, wakers, strict=True):
            future.remove_done_callback(wake)
