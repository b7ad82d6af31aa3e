"""Time: the same order on both loops, and what the real clock alone promises."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable

import pytest
from aio_fixtures import MS, instant, on_both, pending, real

from mcjax import aio
from mcjax.backends.virtual import VirtualLoop


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


# The real clock alone


def _real_only(test: Callable[[aio.WallClock], Awaitable[None]]) -> Callable[[], None]:
    async def main() -> None:
        clock = aio.clock()
        assert isinstance(clock, aio.WallClock)
        await test(clock)

    def wrapper() -> None:
        real(main)

    wrapper.__name__ = test.__name__
    return wrapper


@_real_only
async def test_answers_of_threads_and_timers_come_in_order_of_time_one_at_a_time(clock: aio.WallClock):
    delivered: list[tuple[int, int]] = []  # (stamp no later than, now)
    problems: list[str] = []
    busy = [False]
    loop = asyncio.get_running_loop()
    waiting = [0]
    all_here = pending()

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
    done = pending()

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
    async def fails() -> None:
        raise ValueError("child")

    async def main() -> None:
        aio.spawn(fails(), "lost")
        await instant()

    VirtualLoop().run(main)
    gc.collect()
    assert "never retrieved" in caplog.text
    assert "ValueError: child" in caplog.text
