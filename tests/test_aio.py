from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from mcjax import aio
from mcjax.backends.virtual import VirtualLoop
from mcjax.errors import DeadlineExceeded, PoolFull

MS = 1_000_000

Run = Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]


def _virtual(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return VirtualLoop().run(main)


def _real(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(main(), 20))


@pytest.fixture(params=[_virtual, _real], ids=["virtual", "real"])
def run(request: pytest.FixtureRequest) -> Run:
    return request.param


def on_both(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on both loops."""

    @functools.wraps(test)
    def wrapper(run: Run, **arguments: Any) -> None:
        run(lambda: test(**arguments))

    own = inspect.signature(test)
    loop = inspect.Parameter("run", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    wrapper.__signature__ = own.replace(parameters=[loop, *own.parameters.values()])  # pyright: ignore[reportAttributeAccessIssue]
    return wrapper


async def instant() -> None:
    """One wake-up later: everything that was runnable has run."""
    await aio.sleep_ns(0)


# Time


@on_both
async def test_ties_fire_in_order_of_scheduling_whatever_order_they_were_made_in():
    begin = aio.now_ns()
    order: list[str] = []
    clock = aio.clock()
    for when, name in [(2, "c"), (1, "a"), (2, "d"), (1, "b"), (2, "e")]:
        clock.call_at_ns(begin + when * MS, order.append, name)
    clock.call_at_ns(begin + 2 * MS, order.append, "never").cancel()
    await aio.sleep_until_ns(begin + 2 * MS)
    assert order == ["a", "b", "c", "d", "e"]


@on_both
async def test_now_stands_still_between_wake_ups_and_is_never_before_a_timer():
    begin = aio.now_ns()
    for _ in range(5):
        await asyncio.sleep(0)
    assert aio.now_ns() == begin
    await aio.sleep_until_ns(begin + MS)
    assert aio.now_ns() >= begin + MS
    late = aio.now_ns()
    await aio.sleep_until_ns(begin)  # past: one wake-up, and time does not go back
    assert aio.now_ns() >= late


@on_both
async def test_everything_runnable_runs_before_the_next_of_two_simultaneous_wake_ups():
    order: list[str] = []
    signal = aio.Signal("s")

    async def chain() -> None:
        await signal.wait()
        for step in range(20):
            order.append(f"step {step}")
            await asyncio.sleep(0)

    task = aio.spawn(chain(), "chain")
    due = aio.now_ns() + MS
    aio.clock().call_at_ns(due, signal.set)
    aio.clock().call_at_ns(due, order.append, "second")
    await aio.sleep_until_ns(due)
    assert order == [*(f"step {step}" for step in range(20)), "second"]
    await aio.settle(task)


@on_both
async def test_start_of_run_is_not_disturbed_by_cancelled_timers():
    aio.clock().call_at_ns(aio.now_ns() + 3600 * 1000 * MS, print).cancel()
    done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    done.set_result(1)
    assert await aio.within(aio.now_ns() + 1000 * MS, done) == 1
    aio.start_of_run()
    assert aio.now_ns() == 0


# Signal


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


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


@on_both
async def test_within_gives_the_result_the_error_or_gives_up():
    future, failing, never = _future(), _future(), _future()
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
    first, second = _future(), _future()
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
    futures = [_future() for _ in range(3)]
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


# settle, Scope


@on_both
async def test_settle_waits_for_the_real_end_and_takes_no_interest_in_the_outcome():
    ended: list[str] = []

    async def slow_to_die(name: str) -> None:
        try:
            await _future()
        finally:
            await aio.sleep_ns(MS)
            ended.append(name)
            raise ValueError("nobody cares")

    task = aio.spawn(slow_to_die("a"), "a")
    await instant()
    await aio.settle(task)
    assert ended == ["a"]
    await aio.settle(task)


@on_both
async def test_settle_finishes_its_job_however_often_it_is_cancelled():
    ended: list[str] = []

    async def slow_to_die() -> None:
        try:
            await _future()
        finally:
            await aio.sleep_ns(5 * MS)
            ended.append("child")

    child = aio.spawn(slow_to_die(), "child")
    await instant()
    settling = aio.spawn(aio.settle(child), "settling")
    for _ in range(3):
        await instant()
        settling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await settling
    assert ended == ["child"]


class Children:
    """Children that take time to end, and say when they have."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    async def child(self, name: str) -> None:
        try:
            await _future()
        finally:
            await aio.sleep_ns(2 * MS)
            self.ended.append(name)


@on_both
async def test_a_scope_settles_its_children_in_the_order_they_were_spawned():
    children = Children()
    async with aio.Scope("s") as scope:
        for name in "abc":
            scope.spawn(children.child(name), name)
        await instant()
    assert children.ended == ["a", "b", "c"]


@pytest.mark.parametrize("cancellations", [1, 2, 3])
@on_both
async def test_a_cancelled_scope_still_settles_every_child(cancellations: int):
    children = Children()

    async def block() -> None:
        async with aio.Scope("s") as scope:
            for name in "abcd":
                scope.spawn(children.child(name), name)
            await scope.run(_never())

    task = aio.spawn(block(), "block")
    await instant()
    for _ in range(cancellations):  # the first ends the body, later ones hit the exit
        task.cancel()
        await aio.sleep_ns(MS)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert children.ended == ["a", "b", "c", "d"]


@on_both
async def test_a_cancellation_during_a_normal_exit_is_obeyed_after_the_children_have_ended():
    children = Children()

    async def block() -> None:
        async with aio.Scope("s") as scope:
            for name in "ab":
                scope.spawn(children.child(name), name)
            await instant()

    task = aio.spawn(block(), "block")
    await aio.sleep_ns(MS)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert children.ended == ["a", "b"]


async def _never() -> None:
    await _future()


async def _fails(after_ns: int = 0) -> None:
    if after_ns:
        await aio.sleep_ns(after_ns)
    raise ValueError("child")


@on_both
async def test_a_childs_failure_ends_what_runs_in_the_scope():
    children = Children()

    async def block() -> None:
        async with aio.Scope("s") as scope:
            scope.spawn(_fails(MS), "fails")
            scope.spawn(children.child("a"), "a")
            await scope.run(children.child("body"))

    with pytest.raises(ValueError, match="child"):
        await block()
    assert children.ended == ["body", "a"]


@pytest.mark.parametrize("yields", [1, 2, 3])  # a child that has never run is cancelled instead
@on_both
async def test_a_childs_failure_is_raised_at_the_end_however_late_it_came(yields: int):
    async def block() -> None:
        async with aio.Scope("s") as scope:
            scope.spawn(_fails(), "fails")
            for _ in range(yields):
                await asyncio.sleep(0)

    with pytest.raises(ValueError, match="child"):
        await block()


@on_both
async def test_the_bodys_own_error_is_the_one_that_is_raised():
    async def block() -> None:
        async with aio.Scope("s") as scope:
            scope.spawn(_fails(), "fails")
            await asyncio.sleep(0)
            raise KeyError("body")

    with pytest.raises(KeyError):
        await block()


@on_both
async def test_run_gives_the_bodys_result_and_its_error():
    async with aio.Scope("s") as scope:

        async def body() -> int:
            await instant()
            return 3

        assert await scope.run(body()) == 3
        with pytest.raises(ValueError, match="child"):
            await scope.run(_fails(MS))


@on_both
async def test_a_child_that_a_child_spawns_as_it_ends_is_settled_too():
    ended: list[str] = []
    async with aio.Scope("s") as scope:
        children = Children()

        async def parent() -> None:
            try:
                await _future()
            finally:
                scope.spawn(children.child("late"), "late")
                await instant()
                ended.append("parent")

        scope.spawn(parent(), "parent")
        await instant()
    assert ended == ["parent"]
    assert children.ended == ["late"]


@on_both
async def test_a_childs_end_is_no_failure():
    async with aio.Scope("s") as scope:
        scope.spawn(instant(), "ends")
        cancelled = scope.spawn(_never(), "cancelled")
        await instant()
        await aio.settle(cancelled)
        assert await scope.run(asyncio.sleep(0, "fine")) == "fine"


# The real clock alone


def _real_only(test: Callable[[aio.WallClock], Awaitable[None]]) -> Callable[[], None]:
    async def main() -> None:
        clock = aio.clock()
        assert isinstance(clock, aio.WallClock)
        await test(clock)

    def wrapper() -> None:
        _real(main)

    wrapper.__name__ = test.__name__
    return wrapper


@_real_only
async def test_answers_of_threads_and_timers_come_in_order_of_time_one_at_a_time(clock: aio.WallClock):
    delivered: list[tuple[int, int]] = []  # (stamp no later than, now)
    problems: list[str] = []
    busy = [False]
    loop = asyncio.get_running_loop()
    waiting = [0]
    all_here = _future()

    def arrive(stamp_ns: int) -> None:
        if busy[0]:
            problems.append("a wake-up came before the last one's consequences had run")
        busy[0] = True
        delivered.append((stamp_ns, clock.now_ns()))

        def settled(steps: int) -> None:
            if clock.now_ns() != delivered[-1][1]:
                problems.append("time moved within a wake-up")
            if steps:
                loop.call_soon(settled, steps - 1)
            else:
                busy[0] = False

        loop.call_soon(settled, 5)
        waiting[0] -= 1
        if not waiting[0]:
            all_here.set_result(None)

    def poster(count: int) -> None:
        for index in range(count):
            clock.post(arrive, clock.wall_ns())
            if index % 7 == 0:
                time.sleep(0.0005)

    threads = [threading.Thread(target=poster, args=(60,)) for _ in range(4)]
    timers = 60
    waiting[0] = 4 * 60 + timers
    for index in range(timers):
        due = clock.now_ns() + (index * 37 % 60) * MS // 10
        clock.call_at_ns(due, arrive, due)
    for thread in threads:
        thread.start()
    await all_here
    for thread in threads:
        thread.join()
    assert problems == []
    times = [now for _, now in delivered]
    assert times == sorted(times)
    assert all(now >= stamp for stamp, now in delivered)


@_real_only
async def test_answers_posted_at_once_keep_their_order_and_wake_a_sleeping_loop(clock: aio.WallClock):
    order: list[int] = []
    done = _future()

    def post() -> None:
        time.sleep(0.01)
        for index in range(50):
            clock.post(order.append, index)
        clock.post(done.set_result, None)

    thread = threading.Thread(target=post)
    thread.start()
    await done
    thread.join()
    assert order == list(range(50))


@_real_only
async def test_an_earlier_timer_comes_before_a_later_answer(clock: aio.WallClock):
    order: list[str] = []
    clock.call_at_ns(clock.wall_ns() + MS, order.append, "timer")
    time.sleep(0.003)  # both are due by the time the loop looks
    clock.post(order.append, "answer")
    await aio.sleep_until_ns(clock.wall_ns() + MS)
    assert order == ["timer", "answer"]


@_real_only
async def test_an_earlier_answer_comes_before_a_later_timer(clock: aio.WallClock):
    order: list[str] = []
    clock.post(order.append, "answer")
    clock.call_at_ns(clock.wall_ns() + 1, order.append, "timer")
    time.sleep(0.003)
    await aio.sleep_until_ns(clock.wall_ns() + MS)
    assert order == ["answer", "timer"]


@_real_only
async def test_restart_makes_now_zero_and_is_refused_while_somebody_waits(clock: aio.WallClock):
    await aio.sleep_ns(5 * MS)
    assert clock.now_ns() >= 5 * MS
    timer = clock.call_at_ns(clock.now_ns() + 3600 * 1000 * MS, print)
    with pytest.raises(RuntimeError, match="nobody waits"):
        clock.restart()
    timer.cancel()
    clock.restart()
    assert clock.now_ns() == 0
    await aio.sleep_ns(MS)
    assert clock.now_ns() >= MS


@_real_only
async def test_a_callback_that_fails_does_not_stop_the_clock(clock: aio.WallClock):
    seen: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(str(context["exception"])))

    def bad() -> None:
        raise ValueError("bad callback")

    clock.call_at_ns(clock.now_ns(), bad)
    await aio.sleep_ns(MS)
    assert seen == ["bad callback"]


def test_a_lost_exception_of_a_task_is_logged_in_virtual_time(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        aio.spawn(_fails(), "lost")
        await instant()

    VirtualLoop().run(main)
    gc.collect()
    assert "never retrieved" in caplog.text
    assert "ValueError: child" in caplog.text
