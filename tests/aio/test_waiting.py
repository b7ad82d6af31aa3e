"""Signals, deadlines, queues: woken once, in order, and cancel-safe."""

from __future__ import annotations

import asyncio

import pytest
from aio_fixtures import MS, instant, on_both, pending

from mcjax import aio
from mcjax.backends.virtual import VirtualLoop
from mcjax.errors import DeadlineExceeded, PoolFull


@on_both
async def test_a_flag_raised_before_the_wait_is_found_and_taken_down():
    signal = aio.Signal("s")
    signal.set()
    signal.set()
    assert await signal.wait()
    begin = aio.now_ns()
    assert not await signal.wait(begin + MS)
    assert aio.now_ns() >= begin + MS
    signal.set()
    signal.clear()
    assert not await signal.wait(aio.now_ns() + MS)


@on_both
async def test_a_signal_can_be_used_again_and_wakes_before_its_deadline():
    signal = aio.Signal("s")
    far = aio.now_ns() + 3600 * 1000 * MS
    for _ in range(3):
        aio.clock().call_at_ns(aio.now_ns() + MS, signal.set)
        assert await signal.wait(far)
    assert aio.now_ns() < far


@on_both
async def test_a_flag_raised_as_the_time_runs_out_is_not_lost():
    signal = aio.Signal("s")
    due = aio.now_ns() + MS
    waiter = aio.spawn(signal.wait(due), "waiter")
    await asyncio.sleep(0)

    def at_once() -> None:  # after the deadline has decided, before the waiter has run
        asyncio.get_running_loop().call_soon(signal.set)

    aio.clock().call_at_ns(due - 1, at_once)
    first = await waiter
    second = await signal.wait(aio.now_ns() + MS)
    assert (first, second) in [(True, False), (False, True)]


@on_both
async def test_a_flag_survives_a_waiter_that_is_cancelled_as_it_is_raised():
    signal = aio.Signal("s")
    waiter = aio.spawn(signal.wait(), "waiter")
    await instant()
    signal.set()
    waiter.cancel()
    await aio.settle(waiter)
    assert waiter.cancelled()
    assert await signal.wait(aio.now_ns() + MS)


@on_both
async def test_the_next_waiter_may_come_before_a_cancelled_one_has_left():
    signal = aio.Signal("s")
    first = aio.spawn(signal.wait(), "first")
    await instant()
    first.cancel()
    aio.clock().call_at_ns(aio.now_ns() + MS, signal.set)
    far = aio.now_ns() + 5000 * MS
    assert await signal.wait(far)
    assert first.cancelled()


@on_both
async def test_two_waiters_at_a_time_are_refused():
    signal = aio.Signal("s")
    first = aio.spawn(signal.wait(), "first")
    await instant()
    with pytest.raises(RuntimeError, match="'s' has a waiter"):
        await signal.wait()
    signal.set()
    assert await first


# within, first_of


@on_both
async def test_within_gives_the_result_the_error_or_gives_up():
    future, failing, never = pending(), pending(), pending()
    now = aio.now_ns()
    aio.clock().call_at_ns(now + MS, future.set_result, 7)
    aio.clock().call_at_ns(now + MS, failing.set_exception, PoolFull("n", 1, 0))
    assert await aio.within(now + 5000 * MS, future) == 7
    assert await aio.within(0, future) == 7  # done already: no deadline can be missed
    with pytest.raises(PoolFull):
        await aio.within(now + 5000 * MS, failing)
    with pytest.raises(DeadlineExceeded):
        await aio.within(aio.now_ns() + MS, never)
    assert not never.done()
    never.set_result("late")
    assert await aio.within(0, never) == "late"


@on_both
async def test_within_and_first_of_leave_the_futures_when_they_are_cancelled():
    first, second = pending(), pending()
    for waiting in (aio.within(aio.now_ns() + 5000 * MS, first), aio.first_of([first, second])):
        waiter = aio.spawn(waiting, "waiter")
        await instant()
        await aio.settle(waiter)
        assert waiter.cancelled()
        assert not first.done()
        assert not second.done()
    first.set_result(1)  # and nobody who has left is woken into an error
    await instant()


def _waiter(deadlines: aio.Deadlines, woken: list[tuple[str, int]], name: str) -> asyncio.Future[None]:
    waiter = deadlines.waiter()
    waiter.add_done_callback(lambda _: woken.append((name, aio.now_ns())))
    return waiter


def test_deadlines_wake_whoever_nobody_woke_in_time_and_have_one_timer_for_all():
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        deadlines, woken = aio.Deadlines(10), list[tuple[str, int]]()
        for name in "abcd":
            waiter = _waiter(deadlines, woken, name)
            if name in "bd":
                loop.call_at_ns(aio.now_ns() + 3, waiter.set_result, None)
            await aio.sleep_ns(2)
        timers = [timer for _, _, timer in loop._heap if timer.callback is not None]
        assert len(timers) == 2  # that of d, and one deadline
        await aio.sleep_ns(100)
        assert woken == [("b", 5), ("d", 9), ("a", 10), ("c", 14)]
        assert not loop._heap  # nobody waits any more
        _waiter(deadlines, woken, "e")
        await aio.sleep_ns(100)
        assert woken[-1] == ("e", 118)

    VirtualLoop().run(main)


def test_who_is_woken_in_the_very_instant_of_a_deadline_is_in_time():
    async def main() -> None:
        deadlines, woken = aio.Deadlines(10), list[tuple[str, int]]()
        done = _waiter(deadlines, woken, "done")  # sets the timer that the next one finds
        waiter = deadlines.waiter()
        in_time: list[bool] = []

        def answer() -> None:
            in_time.append(not waiter.done())
            waiter.set_result(None)

        aio.clock().call_at_ns(10, answer)
        done.set_result(None)
        await waiter
        assert in_time == [True]
        await aio.sleep_ns(100)

    VirtualLoop().run(main)


@on_both
async def test_first_of_says_which_and_takes_the_lowest_if_several_are_done():
    futures = [pending() for _ in range(3)]
    aio.clock().call_at_ns(aio.now_ns() + MS, futures[1].cancel)
    assert await aio.first_of(futures) == 1
    futures[2].set_exception(ValueError("kept"))
    assert await aio.first_of(futures[::-1]) == 0
    assert await aio.first_of(futures) == 1
    assert isinstance(futures[2].exception(), ValueError)


# WaitQueue


class Store:
    """Slots taken by the pattern of `Node.reserve_at` and `Pages.take`."""

    def __init__(self, free: int):
        self.free = free
        self.queue = aio.WaitQueue("slots")

    async def take(self, count: int, deadline_ns: int | None = None) -> int:
        found: list[int] = []

        def attempt() -> bool:
            if self.free < count:
                return False
            self.free -= count
            found.append(count)
            return True

        try:
            if not await self.queue.until(attempt, deadline_ns):
                raise PoolFull("slots", count, self.free)
        except BaseException:
            self.give_back(sum(found))
            raise
        return found[0]

    def give_back(self, count: int) -> None:
        self.free += count
        self.queue.notify()


@on_both
async def test_waiters_come_through_in_order_of_arrival_even_if_a_later_one_would_fit():
    store, order = Store(2), list[int]()

    async def taker(count: int) -> None:
        order.append(await store.take(count))

    assert await store.take(1) == 1
    tasks = [aio.spawn(taker(count), "taker") for count in (3, 1, 2)]
    await instant()
    assert order == []  # 1 is free, and the one who needs 3 stands first
    store.give_back(1)
    await instant()
    assert order == []
    store.give_back(2)
    await instant()
    assert order == [3, 1]
    store.give_back(3)
    await instant()
    assert order == [3, 1, 2]
    assert len(store.queue) == 0
    for task in tasks:
        await task


@on_both
async def test_a_waiter_whose_time_ran_out_lets_the_next_ones_through():
    store = Store(1)
    big = aio.spawn(store.take(5, aio.now_ns() + MS), "big")
    await asyncio.sleep(0)
    small = aio.spawn(store.take(1), "small")
    with pytest.raises(PoolFull):
        await big
    assert await small == 1


@on_both
async def test_a_cancelled_waiter_lets_the_next_ones_through():
    store = Store(1)
    big, small = aio.spawn(store.take(5), "big"), aio.spawn(store.take(1), "small")
    await instant()
    assert not small.done()
    await aio.settle(big)
    assert await small == 1


@pytest.mark.parametrize("timeout", [True, False])
@on_both
async def test_who_leaves_the_queue_tells_the_next_by_itself(timeout: bool):
    queue = aio.WaitQueue("q")
    first = aio.spawn(queue.until(lambda: False, aio.now_ns() + MS if timeout else None), "first")
    await asyncio.sleep(0)
    second = aio.spawn(queue.until(lambda: True), "second")
    await asyncio.sleep(0)
    assert not second.done()
    if not timeout:
        first.cancel()
    assert await second
    assert first.cancelled() if not timeout else not first.result()


@on_both
async def test_what_a_cancelled_waiter_was_granted_goes_to_the_next():
    store = Store(0)
    first, second = aio.spawn(store.take(2), "first"), aio.spawn(store.take(2), "second")
    await instant()
    store.give_back(2)  # granted to the first, who has not run yet
    assert store.free == 0
    first.cancel()
    assert await second == 2
    assert first.cancelled()
    store.give_back(2)
    assert store.free == 2


@on_both
async def test_a_condition_that_fails_fails_its_own_waiter():
    queue = aio.WaitQueue("q")
    holds = [False]

    def broken() -> bool:
        if holds[0]:
            raise PoolFull("n", 1, 0)
        return False

    first = aio.spawn(queue.until(broken), "first")
    second = aio.spawn(queue.until(lambda: holds[0]), "second")
    await instant()
    holds[0] = True
    queue.notify()
    with pytest.raises(PoolFull):
        await first
    assert await second


@on_both
async def test_who_waits_for_something_of_its_own_lets_others_by_but_keeps_its_place():
    queue = aio.WaitQueue("q")
    free, own = [0], [0]
    order: list[str] = []

    def takes(name: str, of_its_own: bool = False) -> None:
        def attempt() -> bool | None:
            if of_its_own and not own[0]:
                return None
            if not free[0]:
                return False
            free[0] -= 1
            order.append(name)
            return True

        aio.spawn(queue.until(attempt), name)

    takes("own", of_its_own=True)
    await instant()
    free[0] = 1
    takes("first")  # at once: nobody who waits wants this
    await instant()
    assert order == ["first"]
    takes("second")
    takes("third")
    await instant()
    own[0], free[0] = 1, 2
    queue.notify()
    assert order == ["first", "own", "second"]
    free[0] = 1
    queue.notify()
    assert order == ["first", "own", "second", "third"]
    assert len(queue) == 0
