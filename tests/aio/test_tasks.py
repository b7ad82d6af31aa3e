"""Tasks that somebody owns: they end, whoever is cancelled, and whoever depends on what has gone is told."""

from __future__ import annotations

import asyncio

import pytest
from aio_fixtures import MS, instant, on_both, pending

from mcjax import aio
from mcjax.errors import PoolFull


@on_both
async def test_settle_waits_for_the_real_end_and_takes_no_interest_in_the_outcome():
    ended: list[str] = []

    async def slow_to_die(name: str) -> None:
        try:
            await pending()
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
            await pending()
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
            await pending()
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
    await pending()


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
                await pending()
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


# unless


@on_both
async def test_unless_gives_the_result_while_what_it_depends_on_is_there():
    gone = pending()

    async def work() -> int:
        await aio.sleep_ns(MS)
        return 7

    assert await aio.unless(gone, lambda: PoolFull("x", 1, 0), work()) == 7
    gone.set_result(None)
    await instant()
    await instant()  # what went afterwards cancels nobody


@on_both
async def test_unless_tells_at_once_and_only_when_the_procedure_has_ended():
    gone, ended = pending(), []

    async def work() -> None:
        try:
            await pending()
        finally:
            await aio.sleep_ns(MS)
            ended.append("work")

    task = aio.spawn(aio.unless(gone, lambda: PoolFull("x", 1, 0), work()), "task")
    await instant()
    gone.set_result(None)
    with pytest.raises(PoolFull):
        await task
    assert ended == ["work"]
    with pytest.raises(PoolFull):
        await aio.unless(gone, lambda: PoolFull("x", 1, 0), work())
    assert ended == ["work"], "what has gone is not begun with"


@on_both
async def test_unless_hands_a_result_that_comes_all_the_same_to_discard():
    gone, discarded = pending(), []

    async def stubborn() -> int:
        try:
            await pending()
        except asyncio.CancelledError:
            return 3
        return 0

    task = aio.spawn(aio.unless(gone, lambda: PoolFull("x", 1, 0), stubborn(), discarded.append), "task")
    await instant()
    gone.set_result(None)
    with pytest.raises(PoolFull):
        await task
    assert discarded == [3]


@on_both
async def test_unless_obeys_whoever_cancels_the_task_itself():
    gone = pending()
    task = aio.spawn(aio.unless(gone, lambda: PoolFull("x", 1, 0), aio.sleep_ns(100 * MS)), "task")
    await instant()
    gone.set_result(None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    other = aio.spawn(aio.unless(pending(), lambda: PoolFull("x", 1, 0), aio.sleep_ns(100 * MS)), "other")
    await instant()
    other.cancel()
    with pytest.raises(asyncio.CancelledError):
        await other
