"""Tenants' floors and ceilings: what is promised holds after any operation, and whoever may have room gets it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mcjax import aio
from mcjax.backends.virtual import VirtualLoop
from mcjax.engine.node import Node
from mcjax.errors import ConfigError, IntegrityError, PoolFull, RequestTooLarge
from mcjax.kvpool.eviction.lru import LRU
from mcjax.kvpool.holds import Pin, Reservation
from mcjax.kvpool.pool import Pool
from mcjax.kvpool.quotas import Quota, parse_quotas
from mcjax.kvpool.stores.slots import SlotStore
from mcjax.kvpool.watermark.static import Static
from mcjax.transfer.engine import TransferEngine
from mcjax.types import NullRecorder, Tier

CAPACITY = 12
TENANTS = ("a", "b", "c", "d")
QUOTAS = ({"a": Quota(0.25, 0.5), "b": Quota(0.5, 1.0), "c": Quota(0.0, 0.25)}, {"a": Quota(0.0, 0.75)}, {})

tenants = st.sampled_from(TENANTS)


def pool_of(quotas: Mapping[str, Quota], capacity: int = CAPACITY, watermark: Static | None = None) -> Pool:
    store = SlotStore("n", Tier.DRAM, capacity, 64)
    pool = Pool("n", store, LRU(), watermark or Static(), NullRecorder(), 1000)
    pool.room.quotas = quotas
    return pool


class Tenancy(RuleBasedStateMachine):
    """Chains of three tenants with shares and of one without. A block's number says whose it is."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.pins: list[Pin] = []
        self.reservations: list[Reservation] = []
        self.lent: list[list[int]] = []
        self.next = 0

    @initialize(quotas=st.sampled_from(QUOTAS[:2]), low=st.sampled_from([0.5, 1.0]))
    def start(self, quotas: dict[str, Quota], low: float) -> None:
        self.quotas: Mapping[str, Quota] = quotas
        self.pool = pool_of(quotas, watermark=Static(low, 1.0))
        self.tight = True

    def do(self, action: Any) -> Any:
        async def main() -> Any:
            return action()

        return self.loop.run(main)

    # What the promises mean, from scratch

    def resident(self) -> Counter[str]:
        return Counter(self.owner(block) for block in self.pool.contents())

    def owner(self, block: int) -> str:
        return TENANTS[block % len(TENANTS)]

    def used(self) -> Counter[str]:
        found = self.resident()
        for reservation in self.reservations:
            found[reservation.tenant] += len(reservation)
        for tenant, slots in self.lent_by:
            found[tenant] += len(slots)
        return found

    @property
    def lent_by(self) -> list[tuple[str, list[int]]]:
        return [(TENANTS[slots[0]], slots[1:]) for slots in self.lent]

    def evictable(self) -> Counter[str]:
        """Resident blocks that no pin keeps."""
        kept = {block for pin in self.pins for block in pin.blocks}
        return Counter(self.owner(block) for block in self.pool.contents() if block not in kept)

    def floor(self, tenant: str) -> int:
        return int(self.quotas.get(tenant, Quota()).floor * CAPACITY)

    def ceiling(self, tenant: str) -> int:
        return int(self.quotas.get(tenant, Quota()).ceiling * CAPACITY)

    def may_have(self, tenant: str, count: int) -> bool:
        used, evictable = self.used(), self.evictable()
        over = used[tenant] + count - self.ceiling(tenant)
        others = sum(
            min(evictable[other], max(0, used[other] - self.floor(other))) for other in TENANTS if other != tenant
        )
        return evictable[tenant] >= over and self.pool.store.free_slots + evictable[tenant] + others >= count

    # Operations

    @rule(tenant=tenants, count=st.integers(0, CAPACITY), lends=st.booleans())
    def take(self, tenant: str, count: int, lends: bool) -> None:
        expected, before, resident = self.may_have(tenant, count), self.used(), self.resident()
        try:
            if lends:
                slots = self.do(lambda: self.pool.lend(1, count, tenant=tenant))
                self.lent.append([TENANTS.index(tenant), *slots])
            else:
                self.reservations.append(self.do(lambda: self.pool.reserve(1, count, tenant=tenant)))
        except PoolFull:
            assert not expected, "unpinned blocks that it may take were enough"
            assert self.resident() == resident, "who gets nothing evicts nothing"
            return
        assert expected
        after = self.resident()
        assert self.used()[tenant] <= max(self.ceiling(tenant), before[tenant])
        if self.tight:
            assert self.used()[tenant] <= self.ceiling(tenant)
        for other in TENANTS:
            if other != tenant and after[other] < resident[other]:
                assert self.used()[other] >= self.floor(other)

    @rule(pick=st.integers(0, 99), count=st.integers(1, 5))
    def commit(self, pick: int, count: int) -> None:
        if not self.reservations:
            return
        reservation = self.reservations[pick % len(self.reservations)]
        blocks = self.chain(reservation.tenant, min(count, len(reservation)))
        if blocks:
            self.do(lambda: self.pool.commit(reservation, blocks, None))

    def chain(self, tenant: str, count: int) -> tuple[int, ...]:
        first, at = self.next, TENANTS.index(tenant)
        self.next += count
        return tuple(block * len(TENANTS) + at for block in range(first, first + count))

    @rule(pick=st.integers(0, 99), keep=st.booleans())
    def return_lent(self, pick: int, keep: bool) -> None:
        if not self.lent:
            return
        at, *slots = self.lent.pop(pick % len(self.lent))
        if keep and slots:
            tenant = TENANTS[at]
            self.do(lambda: self.pool.keep(1, slots, self.chain(tenant, len(slots)), None, tenant=tenant))
        else:
            self.do(lambda: self.pool.take_back(slots))

    @rule(pick=st.integers(0, 99), depth=st.integers(1, 5))
    def pin(self, pick: int, depth: int) -> None:
        blocks = list(self.pool.contents())
        if blocks:
            deepest = blocks[pick % len(blocks)]
            self.pins.append(self.do(lambda: self.pool.pin(1, self.pool.chain(deepest)[:depth])))

    @rule(pick=st.integers(0, 99))
    def let_go(self, pick: int) -> None:
        holds: list[Any] = [*self.pins, *self.reservations]
        if holds:
            hold = holds[pick % len(holds)]
            self.do(lambda: self.pool.release(hold))
            if isinstance(hold, Pin):
                self.pins.remove(hold)
            else:
                self.reservations.remove(hold)

    @rule(pick=st.integers(0, 99))
    def corrupt(self, pick: int) -> None:
        pinned = {block for pin in self.pins for block in pin.blocks}
        blocks = [block for block in self.pool.contents() if block not in pinned]
        if blocks:
            self.do(lambda: self.pool.drop([blocks[pick % len(blocks)]]))

    @rule(quotas=st.sampled_from(QUOTAS))
    def other_quotas(self, quotas: dict[str, Quota]) -> None:
        """From now on; who is above its new ceiling stays there until it asks for more."""
        self.pool.room.quotas = self.quotas = quotas
        self.tight = False

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity()
            shares = self.pool.room.shares
            assert shares is not None
            used = self.used()
            assert {tenant: shares.used(tenant) for tenant in TENANTS} == {tenant: used[tenant] for tenant in TENANTS}


TestTenancy = Tenancy.TestCase
TestTenancy.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def in_virtual_time(action: Any) -> Any:
    async def main() -> Any:
        return action()

    return VirtualLoop().run(main)


def fill(pool: Pool, tenant: str, blocks: tuple[int, ...]) -> None:
    reservation = pool.reserve(1, len(blocks), tenant=tenant)
    pool.commit(reservation, blocks, None)
    pool.release(reservation)


def test_a_tenant_at_its_ceiling_makes_room_among_its_own() -> None:
    def main() -> None:
        pool = pool_of({"a": Quota(0.0, 0.5)})
        fill(pool, "b", (100, 101))
        fill(pool, "a", (1, 2, 3, 4, 5, 6))
        fill(pool, "a", (11, 12))
        assert sorted(pool.contents()) == [1, 2, 3, 4, 11, 12, 100, 101]  # though six slots are free
        pin = pool.pin(1, (1, 2, 3, 4))
        with pytest.raises(PoolFull, match="3 blocks needed, 2 can be freed within the tenant's share") as full:
            pool.reserve(1, 3, tenant="a")
        assert full.value.own
        pool.release(pin)
        pool.release(pool.reserve(1, 3, tenant="a"))

    in_virtual_time(main)


def test_the_floor_of_the_least_recent_is_kept() -> None:
    def main() -> None:
        pool = pool_of({"a": Quota(0.25, 1.0)})
        fill(pool, "a", (1, 2, 3, 4, 5))
        fill(pool, "b", tuple(range(100, 107)))
        fill(pool, "b", tuple(range(200, 205)))
        assert [block for block in pool.contents() if block < 100] == [1, 2, 3]
        fill(pool, "a", (51, 52))
        assert [block for block in pool.contents() if block < 100] == [1, 51, 52], "its floor is no bar to itself"

    in_virtual_time(main)


def test_counting_may_begin_late_and_recovers_what_is_held() -> None:
    def main() -> None:
        pool = pool_of({})
        assert pool.room.shares is None
        assert pool.room.most("a") == CAPACITY
        fill(pool, "a", (1, 2))
        before = pool.reserve(1, 2, tenant="a")
        lent = pool.lend(1, 2, tenant="a")
        pool.room.quotas = {"a": Quota(0.0, 0.5)}
        pool.check_integrity()
        assert pool.room.shares is not None
        assert (pool.room.shares.used("a"), pool.room.shares.used("")) == (2, 4)
        assert pool.room.tenant_of(1) == ""
        pool.take_back(lent)
        pool.release(before)
        pool.check_integrity()
        fill(pool, "a", (10, 11, 12, 13, 14, 15))
        assert sorted(pool.contents()) == [1, 2, 10, 11, 12, 13, 14, 15]

    in_virtual_time(main)


def test_a_miscount_is_found() -> None:
    def main() -> None:
        pool = pool_of({"a": Quota(0.0, 0.5)})
        fill(pool, "a", (1, 2))
        assert pool.room.shares is not None
        pool.room.shares.take("a", 1)
        with pytest.raises(IntegrityError, match="tenants have"):
            pool.check_integrity()

    in_virtual_time(main)


def test_who_waits_for_its_own_share_holds_up_nobody() -> None:
    async def main() -> None:
        pool = pool_of({"a": Quota(0.0, 0.5)})
        node = Node("n", pool, TransferEngine([], NullRecorder()), 10_000)
        first = await node.reserve_at(node, 1, 6, "a")
        with pytest.raises(RequestTooLarge, match="needs 7 blocks, of which tenant a may have 6 in n"):
            await node.reserve_at(node, 2, 7, "a")
        waiting = aio.spawn(node.reserve_at(node, 3, 2, "a"), "a")
        await aio.sleep_ns(1)
        second = await node.reserve_at(node, 4, 4, "b")
        assert aio.now_ns() == 1
        third = aio.spawn(node.reserve_at(node, 5, 4, "b"), "b")  # room is short for everybody now
        fourth = aio.spawn(node.reserve_at(node, 6, 1, "b"), "c")
        await aio.sleep_ns(1)
        assert not waiting.done()
        assert not third.done()
        assert not fourth.done(), "who waits for the room of all is not overtaken"
        pool.release(second)
        for task in (third, fourth):
            pool.release(await task)
        assert not waiting.done()
        pool.release(first)
        pool.release(await waiting)
        pool.check_idle()

    VirtualLoop().run(main)


@pytest.mark.parametrize(
    ("tenants", "message"),
    [
        ({"a": 0.5}, r"kvpool\.tenants\.a=0\.5: must be a mapping"),
        ({"a": {"flor": 0.5}}, r"kvpool\.tenants\.a\.flor.*unknown key"),
        ({"a": {"floor": 1.5}}, r"kvpool\.tenants\.a\.floor.*a share of the tier, from 0 to 1"),
        ({"a": {"ceiling": True}}, r"kvpool\.tenants\.a\.ceiling.*a share of the tier, from 0 to 1"),
        ({"a": {"ceiling": "half"}}, r"kvpool\.tenants\.a\.ceiling.*a share of the tier, from 0 to 1"),
        ({"a": {"floor": 0.5, "ceiling": 0.4}}, r"kvpool\.tenants\.a\.floor.*above the tenant's ceiling of 0\.4"),
        ({"a": {"ceiling": 0}}, r"kvpool\.tenants\.a\.ceiling.*no room at all"),
        (
            {"a": {"floor": 0.6}, "b": {"floor": 0.5}},
            r"kvpool\.tenants.*1\.1.*more than the whole tier \(a 0\.6, b 0\.5\)",
        ),
    ],
)
def test_shares_that_cannot_work_are_named(tenants: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_quotas(tenants)


def test_floors_may_be_the_whole_tier() -> None:
    parsed = parse_quotas({"a": {"floor": 0.7}, "b": {"floor": 0.2, "ceiling": 0.5}, "c": {"floor": 0.1}})
    assert parsed == {"a": Quota(0.7, 1.0), "b": Quota(0.2, 0.5), "c": Quota(0.1, 1.0)}
