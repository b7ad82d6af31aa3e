from __future__ import annotations

import asyncio
import contextvars

import pytest

from mcjax import aio
from mcjax.backends.virtual import VirtualLoop
from mcjax.errors import Deadlock

HOUR_NS = 3600 * 1_000_000_000


async def _never() -> None:
    await asyncio.get_running_loop().create_future()


def test_time_costs_nothing_and_is_exact():
    async def main() -> tuple[int, int]:
        await aio.sleep_ns(1)
        first = aio.now_ns()
        for _ in range(1000):
            await aio.sleep_ns(HOUR_NS)
        return first, aio.now_ns()

    assert VirtualLoop().run(main) == (1, 1 + 1000 * HOUR_NS)


def test_stock_sleep_counts_in_virtual_time_too():
    async def main() -> int:
        assert await asyncio.sleep(1.5, "result") == "result"
        return aio.now_ns()

    assert VirtualLoop().run(main) == 1_500_000_000


def test_a_deadlock_lists_who_waits_where():
    async def inner() -> None:
        await aio.Signal("nobody sets it").wait()

    async def outer() -> None:
        await inner()

    async def main() -> None:
        await aio.sleep_ns(2_000_000_000)
        task = aio.spawn(outer(), "the stuck one")
        await aio.first_of([task])

    with pytest.raises(Deadlock) as caught:
        VirtualLoop().run(main)
    lines = str(caught.value).splitlines()
    assert "2.000000 s" in lines[0]
    main_line, stuck_line = lines[1:]
    assert main_line.strip().startswith("main: ")
    assert "first_of" in main_line
    assert stuck_line.strip().startswith("the stuck one: ")
    assert stuck_line.index("outer:") < stuck_line.index("inner:") < stuck_line.index("Signal.wait:")


def test_a_long_deadlock_report_is_cut():
    async def main() -> None:
        async with aio.Scope("s") as scope:
            for index in range(100):
                scope.spawn(_never(), f"task {index}")
            await scope.run(_never())

    with pytest.raises(Deadlock, match=r"and \d+ more"):
        VirtualLoop().run(main)


def test_after_a_deadlock_every_finally_block_has_run():
    ended: list[str] = []

    async def child(name: str) -> None:
        try:
            await _never()
        finally:
            await asyncio.sleep(0)  # takes no time, but another turn
            ended.append(name)

    async def main() -> None:
        async with aio.Scope("s") as scope:
            scope.spawn(child("a"), "a")
            scope.spawn(child("b"), "b")
            await scope.run(child("body"))

    with pytest.raises(Deadlock):
        VirtualLoop().run(main)
    assert sorted(ended) == ["a", "b", "body"]


def test_threads_are_refused():
    async def main() -> None:
        with pytest.raises(RuntimeError, match="call_soon_threadsafe"):
            asyncio.get_running_loop().call_soon_threadsafe(print)
        with pytest.raises(RuntimeError, match="no other threads"):
            aio.clock().post(print)
        with pytest.raises(RuntimeError, match="already running"):
            loop.run(_never)

    loop = VirtualLoop()
    loop.run(main)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["callback", "timer", "main", "child"])
def test_an_interrupt_is_raised_and_leaves_finally_blocks_run(interrupt, where):
    ended: list[str] = []

    def stop() -> None:
        raise interrupt

    async def stopping() -> None:
        await asyncio.sleep(0)
        stop()

    async def child() -> None:
        try:
            await _never()
        finally:
            ended.append("child")

    async def main() -> None:
        try:
            async with aio.Scope("s") as scope:
                scope.spawn(child(), "child")
                await aio.sleep_ns(1)
                if where == "callback":
                    asyncio.get_running_loop().call_soon(stop)
                elif where == "timer":
                    aio.clock().call_at_ns(5, stop)
                elif where == "child":
                    scope.spawn(stopping(), "stopping")
                else:
                    stop()
                await _never()
        finally:
            ended.append("main")

    with pytest.raises(interrupt):
        VirtualLoop().run(main)
    assert ended == ["child", "main"]


def test_trouble_while_cleaning_up_does_not_hide_the_cause_nor_keep_others_from_it():
    ended: list[str] = []

    def bad() -> None:
        raise ValueError("in a callback")

    async def child() -> None:
        try:
            await _never()
        finally:
            asyncio.get_running_loop().call_soon(bad)
            await asyncio.sleep(0)
            ended.append("child")

    async def main() -> None:
        aio.spawn(child(), "child")
        await asyncio.sleep(0)
        raise KeyError("the cause")

    with pytest.raises(KeyError, match="the cause"):
        VirtualLoop().run(main)
    assert ended == ["child"]


def test_tasks_left_over_at_a_good_end_are_cancelled_as_on_a_stock_loop():
    ended: list[str] = []

    async def child() -> None:
        try:
            await _never()
        finally:
            ended.append("child")

    async def main() -> str:
        aio.spawn(child(), "left over")
        await asyncio.sleep(0)
        return "done"

    assert VirtualLoop().run(main) == "done"
    assert ended == ["child"]


def test_inside_a_running_loop_the_outer_one_comes_back_untouched():
    async def virtual() -> int:
        task = asyncio.current_task()
        assert task is not None
        assert task.get_name() == "main"
        await aio.sleep_ns(HOUR_NS)
        return aio.now_ns()

    async def failing() -> None:
        raise KeyError("inner")

    async def outer() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        order: list[str] = []
        loop.call_soon(order.append, "outer callback")
        assert VirtualLoop().run(virtual) == HOUR_NS
        with pytest.raises(KeyError):
            VirtualLoop().run(failing)
        assert order == []  # the outer loop stood still
        assert asyncio.get_running_loop() is loop
        assert asyncio.current_task() is task
        await asyncio.sleep(0)
        assert order == ["outer callback"]
        async with asyncio.timeout(10):
            await asyncio.create_task(asyncio.sleep(0))

    asyncio.run(outer())
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()


def test_a_virtual_run_inside_a_virtual_run():
    async def inner() -> int:
        await aio.sleep_ns(7)
        return aio.now_ns()

    async def outer() -> tuple[int, int]:
        await aio.sleep_ns(5)
        found = VirtualLoop().run(inner)
        await aio.sleep_ns(5)
        return found, aio.now_ns()

    assert VirtualLoop().run(outer) == (7, 10)


def test_run_until_steps_by_hand():
    loop = VirtualLoop()
    seen: list[int] = []

    async def main() -> None:
        for _ in range(3):
            await asyncio.sleep(1)
            seen.append(loop.now_ns())

    task = loop.create_task(main())
    assert not loop.run_until(task, 500_000_000)
    assert (seen, loop.now_ns()) == ([], 500_000_000)
    assert not loop.run_until(task, 2_000_000_000)
    assert (seen, loop.now_ns()) == ([1_000_000_000, 2_000_000_000], 2_000_000_000)
    assert loop.run_until(task, 9_000_000_000)
    assert loop.now_ns() == 3_000_000_000


def test_context_variables_follow_their_tasks():
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")
    context = contextvars.copy_context()
    context.run(variable.set, "given")

    async def read() -> str:
        await aio.sleep_ns(1)
        return variable.get()

    async def main() -> tuple[str, str]:
        loop = asyncio.get_running_loop()
        given = loop.create_task(read(), context=context)
        variable.set("main's")
        return await given, await loop.create_task(read())

    assert VirtualLoop().run(main) == ("given", "main's")
    assert variable.get() == "none"
