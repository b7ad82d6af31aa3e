"""Those who hold slots: nodes with leases and heartbeats, and an instance's pages, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from mcjax import aio
from mcjax.backends.virtual import VirtualLoop
from mcjax.engine.node import Node
from mcjax.engine.pages import Pages
from mcjax.errors import InstanceDown, IntegrityError, LeaseLost, PoolFull, RequestTooLarge
from mcjax.kvpool.eviction.lru import LRU
from mcjax.kvpool.pool import Pool
from mcjax.kvpool.stores.slots import SlotStore
from mcjax.kvpool.watermark.static import Static
from mcjax.transfer.engine import TransferEngine
from mcjax.types import NullRecorder, Tier

LEASE_NS = 900
WAIT_NS = 10_000


def virtual(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def wrapper() -> None:
        VirtualLoop().run(test)

    wrapper.__name__ = test.__name__
    return wrapper


def pages(capacity: int, caches: bool = False) -> Pages:
    pool = Pool("n", SlotStore("n", Tier.HBM, capacity, 64), LRU(), Static(), NullRecorder(), LEASE_NS)
    return Pages(pool, caches)


def node(name: str, capacity: int = 4) -> Node:
    store = SlotStore(name, Tier.DRAM, capacity, 64)
    pool = Pool(name, store, LRU(), Static(), NullRecorder(), LEASE_NS)
    return Node(name, pool, TransferEngine([], NullRecorder()), WAIT_NS)


@pytest.mark.parametrize("alive_ns", [20 * LEASE_NS + extra for extra in range(0, LEASE_NS // 3, 71)])
def test_a_lease_lives_as_long_as_its_holder_and_not_one_lease_longer(alive_ns: int):
    async def main() -> None:
        holder, host = node("holder"), node("host")
        async with aio.Scope("s") as scope:
            heartbeat = scope.spawn(holder.heartbeat(), "holder")
            scope.spawn(host.heartbeat(), "host")
            await aio.sleep_ns(123)
            reservation = await holder.reserve_at(host, 1, 3)
            pin = holder.pin_at(host, 1, ())
            await aio.sleep_ns(alive_ns)  # a burst makes it wait: heartbeats carry it
            reservation.check()
            pin.check()
            holder.fail()
            await aio.settle(heartbeat)
            holder.give_back(host, reservation)  # the dead can not
            assert host.pool.store.free_slots == 1
            await aio.sleep_ns(LEASE_NS)
            assert host.pool.store.free_slots == 4
            for hold in (reservation, pin):
                with pytest.raises(LeaseLost):
                    hold.check()
            host.pool.release(reservation)  # a late completion
            host.pool.check_idle()

    VirtualLoop().run(main)


@virtual
async def test_a_lease_that_is_adopted_needs_no_heartbeat_and_one_given_back_is_gone_at_once():
    holder, host = node("holder"), node("host")
    async with aio.Scope("s") as scope:
        heartbeat = scope.spawn(holder.heartbeat(), "holder")
        scope.spawn(host.heartbeat(), "host")
        kept, returned = await holder.reserve_at(host, 1, 1), await holder.reserve_at(host, 2, 2)
        host.adopt(kept)
        holder.give_back(host, returned)
        assert host.pool.store.free_slots == 3
        holder.fail()
        await aio.settle(heartbeat)
        await aio.sleep_ns(5 * LEASE_NS)
        kept.check()
        host.pool.release(kept)
        host.pool.check_idle()


@virtual
async def test_whoever_waits_for_room_comes_through_in_turn_or_is_told_in_time():
    home = node("home")
    first = await home.reserve_at(home, 1, 3)
    begin = aio.now_ns()
    big, small = aio.spawn(home.reserve_at(home, 2, 4), "big"), aio.spawn(home.reserve_at(home, 3, 1), "small")
    await aio.sleep_ns(10)
    assert not small.done()  # it would fit, but it is not its turn
    with pytest.raises(PoolFull):
        await big
    assert aio.now_ns() == begin + WAIT_NS
    home.pool.release(await small)
    home.pool.release(first)
    home.pool.check_idle()
    with pytest.raises(RequestTooLarge, match="needs 5 blocks, pool home has 4"):
        await home.reserve_at(home, 4, 5)


@virtual
async def test_what_was_granted_to_a_cancelled_waiter_goes_to_the_next():
    home, other = node("home"), node("other")
    held = await home.reserve_at(home, 1, 4)
    first, second = aio.spawn(other.reserve_at(home, 2, 4), "first"), aio.spawn(home.reserve_at(home, 3, 4), "second")
    await aio.sleep_ns(10)
    home.pool.release(held)
    home.pool.space.notify()  # granted to the first, who has not run yet
    assert home.pool.store.free_slots == 0
    first.cancel()
    home.pool.release(await second)
    assert first.cancelled()
    home.pool.check_idle()
    assert home.pool.store.free_slots == 4


@virtual
async def test_whoever_waits_for_a_node_that_dies_is_told_at_once():
    home, host = node("home"), node("host")
    held = await host.reserve_at(host, 1, 4)
    waiting = [aio.spawn(home.reserve_at(host, owner, 1), "waiter") for owner in (2, 3)]
    await aio.sleep_ns(10)
    host.fail()
    for task in waiting:
        with pytest.raises(InstanceDown, match="host"):
            await task
    assert aio.now_ns() == 10
    host.pool.release(held)


@virtual
async def test_pages_are_handed_out_whole_in_order_and_a_cancelled_taker_keeps_none():
    held = pages(4)
    mine = await held.take(0, 3)
    takers = [aio.spawn(held.take(0, count), "taker") for count in (4, 2, 1)]
    await aio.sleep_ns(1)
    assert held.store.free_slots == 1
    held.release(mine)  # granted to the first taker, who has not run yet
    assert held.store.free_slots == 0
    takers[0].cancel()
    assert len((await takers[1]).pages) == 2
    assert len((await takers[2]).pages) == 1
    with pytest.raises(asyncio.CancelledError):
        await takers[0]
    with pytest.raises(IntegrityError, match="3 lent slots have not come back"):
        held.check_idle()
    for taker in takers[1:]:
        held.release(taker.result())
    held.check_idle()


@virtual
async def test_a_taker_is_woken_when_a_transfer_lets_go_of_pages_that_were_given_back():
    held = pages(2)
    mine = await held.take(0, 2)
    region = held.store.regions(mine.pages)
    held.store.hold(region)
    held.release(mine)  # its request was cancelled; the copy into them is still under way
    taker = aio.spawn(held.take(0, 2), "taker")
    await aio.sleep_ns(5)
    assert not taker.done()
    held.store.let_go(region)
    assert await taker
    assert aio.now_ns() == 5


@virtual
async def test_a_page_that_a_transfer_still_reads_is_waited_for_though_its_block_has_left():
    device = pages(4, caches=True)
    first = await device.take(0, 2)
    device.keep(first, (7, 8))
    device.release(first)
    assert device.available == 4
    region = device.pool.region((7, 8))
    device.store.hold(region)  # whoever asked for the copy has gone
    last = await device.take(0, 1)
    taker = aio.spawn(device.take(1, 4), "taker")
    other = aio.spawn(device.take(2, 1), "other")
    await aio.sleep_ns(5)
    assert device.available == 3
    device.release(last)  # there seem to be enough now
    await aio.sleep_ns(5)
    assert not taker.done()
    assert not other.done()
    device.store.let_go(region)
    held = await taker
    assert sorted(held.pages) == [0, 1, 2, 3]
    device.release(held)
    device.release(await other)
    device.check_idle()


@virtual
async def test_pages_with_blocks_are_read_in_place_and_leave_when_nobody_does():
    device = pages(6, caches=True)
    first = await device.take(0, 4)
    device.keep(first, (1, 2, 3))
    assert device.available == 2
    second = await device.take(1, 4, (1, 2, 3), 2)
    assert second.pages[:2] == first.pages[:2]
    assert (second.shared, second.cached) == (2, 3)
    device.release(first)
    assert device.available == 1, "the block to be copied is still wanted"
    device.copied(second)
    assert device.available == 2
    third = await device.take(2, 2)
    assert device.pool.contents().keys() == {1, 2}, "the block that nobody reads went, and no other"
    assert not device.more(2, 1)
    for held in (second, third):
        device.release(held)
    assert device.available == 6
    device.check_idle()


@virtual
async def test_two_who_filled_the_same_blocks_go_on_with_those_of_the_first():
    device = pages(8, caches=True)
    first, second = await device.take(0, 4), await device.take(1, 4)
    device.keep(first, (1, 2))
    device.keep(second, (1, 2, 3))
    assert second.pages[:2] == first.pages[:2]
    assert device.available == 2, "its own two are free"
    device.give_back(second.own, 1, (1, 2, 3, 4), 3)
    second.pages = second.pages[:3]
    device.release(second)
    device.release(first)
    assert list(device.pool.contents()) == [1, 2, 3, 4]
    assert device.available == 8
    device.check_idle()
