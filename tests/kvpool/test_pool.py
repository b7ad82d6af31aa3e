"""The pool against a naive model of itself, with real bytes, in virtual time, whatever is done in whatever order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mcjax import aio
from mcjax.backends.virtual import VirtualLoop
from mcjax.errors import InstanceDown, IntegrityError, LeaseLost, PoolFull, StaleRegion
from mcjax.kvpool.eviction.lru import LRU
from mcjax.kvpool.holds import Hold, Pin, Reservation
from mcjax.kvpool.pool import Pool
from mcjax.kvpool.stores.host import HostStore
from mcjax.kvpool.watermark.static import Static
from mcjax.transfer.base import Region
from mcjax.types import NullRecorder

T = TypeVar("T")

CAPACITY = 8
LEASE_NS = 1000
# Three chains; the second leaves the first after two blocks.
PATHS = [(0, 1, 2, 3, 4), (0, 1, 12, 13), (20, 21, 22, 23)]
BLOCKS = sorted({block for path in PATHS for block in path})

paths = st.sampled_from(PATHS)
picks = st.integers(0, 10**6)


def checksum(block: int) -> bytes:
    return b"sum of %d" % block


def fill(store: HostStore, slot: int, block: int) -> None:
    store.buffer()[slot] = np.arange(8) + block


def bytes_of(region: Region) -> list[int | None]:
    """The block that each slot's bytes are of, or None for anything else."""
    rows = region.memory.buffer()
    assert rows is not None
    found = [rows[slot].tolist() for slot in region.slots]
    return [row[0] if row == list(range(row[0], row[0] + 8)) else None for row in found]


@dataclass(eq=False)
class Copy:
    """One stay of a block in the pool, as the model sees it."""

    block: int
    parent: int | None
    used: int = 0
    slot: int = -1
    freed: bool = False
    detached: bool = False


@dataclass(eq=False)
class Held:
    """A hold and what the model knows of it."""

    hold: Any
    deepest: Copy | None = None
    slots: list[int] = field(default_factory=list[int])
    expires_ns: int | None = None


def has_pin(machine: Any) -> bool:
    return machine.pick(Pin, 0) is not None


def has_hold(machine: Any) -> bool:
    return bool(machine.holds)


class PoolMachine(RuleBasedStateMachine):
    """Everything a pool can be asked to do, checked against a model that is too slow to be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.store = HostStore("n", CAPACITY, 8, poison=True)
        self.changes: list[tuple[int, int]] = []
        self.pool = Pool("n", self.store, LRU(), Static(), NullRecorder(), LEASE_NS, self.on_change)
        self.resident: dict[int, Copy] = {}
        self.holds: list[Held] = []
        self.gone: list[Hold] = []
        self.regions: list[tuple[Region, list[Copy]]] = []
        self.in_flight: list[Region] = []
        self.reported: set[int] = set()
        self.tick = 0
        self.now_ns = 0
        self.fails = False

    def on_change(self, sign: int, blocks: Any) -> None:
        self.changes += [(sign, block) for block in blocks]
        for block in blocks:
            assert (block in self.reported) == (sign < 0)
            self.reported ^= {block}

    def do(self, action: Callable[[], T]) -> T:
        """Run `action` inside the loop, and check everything afterwards."""

        async def main() -> T:
            return action()

        self.changes.clear()
        return self.loop.run(main)

    # The model

    def prefix(self, path: tuple[int, ...]) -> int:
        depth = 0
        while depth < len(path) and path[depth] in self.resident:
            depth += 1
        return depth

    def pinned(self, copy: Copy) -> bool:
        return any(held.deepest is copy for held in self.holds)

    def touch(self, copy: Copy) -> None:
        self.tick += 1
        copy.used = self.tick

    def leaves(self) -> list[Copy]:
        """What could be evicted now, in LRU order."""
        parents = {copy.parent for copy in self.resident.values()}
        found = [c for c in self.resident.values() if c.block not in parents and not self.pinned(c)]
        return sorted(found, key=lambda copy: copy.used)

    def in_transfer(self, slot: int) -> bool:
        return any(slot in region.slots for region in self.in_flight)

    def evictable(self) -> list[Copy]:
        """Everything that could go if it had to: neither it nor what continues it is pinned."""
        kept: set[int] = set()
        for copy in self.resident.values():
            above: int | None = copy.block
            if self.pinned(copy):
                while above is not None:
                    kept.add(above)
                    above = self.resident[above].parent
        return [copy for copy in self.resident.values() if copy.block not in kept]

    def forget(self, copy: Copy) -> None:
        del self.resident[copy.block]
        if self.pinned(copy):
            copy.detached = True
        else:
            copy.freed = True

    def let_go(self, held: Held) -> None:
        """The hold is gone, in the model."""
        self.holds.remove(held)
        self.gone.append(held.hold)
        copy = held.deepest
        if copy is not None and copy.detached and not self.pinned(copy):
            copy.freed = True

    def expiry(self, leased: bool) -> int | None:
        return self.now_ns + LEASE_NS if leased else None

    def pick(self, kind: type, pick: int) -> Held | None:
        found = [held for held in self.holds if isinstance(held.hold, kind)]
        return found[pick % len(found)] if found else None

    # What a request does

    @initialize(fails=st.booleans(), written=st.lists(paths, max_size=2))
    def begin(self, fails: bool, written: list[tuple[int, ...]]) -> None:
        self.fails = fails
        for path in written:
            self.write(path, 3, False, False)

    @rule(path=paths, count=st.integers(1, 3), leased=st.booleans(), keep=st.booleans())
    def write(self, path: tuple[int, ...], count: int, leased: bool, keep: bool) -> None:
        """What a request does: pin what is there, write what comes next, deepen the pin, let go (or not yet)."""
        self.pin(path, leased)
        pin = self.holds[-1]
        start = len(pin.hold.blocks)
        count = min(count, len(path) - start)
        held = self.take(count, leased) if count else None
        if held is not None:
            self.fill_and_commit(held, path, start, count)
            self.extend(pin, path)
            self.do(lambda: self.pool.release(held.hold))
            self.let_go(held)
        if not keep:
            self.do(lambda: self.pool.release(pin.hold))
            self.let_go(pin)

    @rule(path=paths)
    def probe(self, path: tuple[int, ...]) -> None:
        """Existence probes neither keep blocks alive nor make them more recent: evictions are compared exactly."""
        assert self.do(lambda: self.pool.match(path)) == self.prefix(path)

    @rule(path=paths, leased=st.booleans())
    def pin(self, path: tuple[int, ...], leased: bool) -> None:
        pin = self.do(lambda: self.pool.pin(1, path, leased))
        depth = self.prefix(path)
        assert pin.blocks == path[:depth]
        for block in reversed(pin.blocks):
            self.touch(self.resident[block])
        deepest = self.resident[path[depth - 1]] if depth else None
        self.holds.append(Held(pin, deepest, expires_ns=self.expiry(leased)))

    @precondition(has_pin)
    @rule(pick=picks, path=paths)
    def deepen(self, pick: int, path: tuple[int, ...]) -> None:
        held = self.pick(Pin, pick)
        assert held is not None
        if path[: len(held.hold.blocks)] == held.hold.blocks:
            self.extend(held, path)

    def extend(self, held: Held, path: tuple[int, ...]) -> None:
        before, depth = held.deepest, self.prefix(path)
        longer = depth > len(held.hold.blocks)
        expected = path[:depth] if longer else held.hold.blocks
        self.do(lambda: self.pool.deepen(held.hold, path))
        assert held.hold.blocks == expected
        if longer:
            held.deepest = self.resident[path[depth - 1]]
            for block in reversed(expected):
                self.touch(self.resident[block])
            if before is not None and before.detached and not self.pinned(before):
                before.freed = True

    def was_dropped(self, held: Held) -> bool:
        return held.deepest is not None and held.deepest.detached

    @precondition(has_pin)
    @rule(pick=picks)
    def read(self, pick: int) -> None:
        held = self.pick(Pin, pick)
        assert held is not None
        if not held.hold.blocks:
            return
        blocks = held.hold.blocks
        if not all(block in self.resident for block in blocks):
            for asked in (self.pool.region, self.pool.checksums):
                with pytest.raises(StaleRegion):
                    self.do(lambda asked=asked: asked(blocks))
            return
        region = self.do(lambda: self.pool.region(blocks))
        assert bytes_of(region) == list(blocks)
        assert self.pool.checksums(blocks) == tuple(map(checksum, blocks))
        self.regions.append((region, [self.resident[block] for block in blocks]))

    @rule(count=st.integers(1, CAPACITY), leased=st.booleans())
    def reserve(self, count: int, leased: bool) -> None:
        self.take(count, leased)

    def take(self, count: int, leased: bool) -> Held | None:
        """Succeeds exactly when what nobody holds is enough, and evicts exactly as many as it must, in LRU order."""
        free = self.store.free_slots
        enough = free + sum(not self.in_transfer(copy.slot) for copy in self.evictable()) >= count
        expected: list[Copy] = []
        if enough or self.in_flight:
            while free < count and (leaves := self.leaves()):
                copy = leaves[0]
                free += not self.in_transfer(copy.slot)
                expected.append(copy)
                self.forget(copy)
        try:
            reservation = self.do(lambda: self.pool.reserve(2, count, leased))
        except PoolFull:
            assert not enough
            if self.in_flight:  # some may have gone before it turned out that transfers keep their slots
                for copy in expected[len(self.changes) :][::-1]:
                    self.resident[copy.block] = copy
                    copy.freed = False
                expected = expected[: len(self.changes)]
            assert self.changes == [(-1, copy.block) for copy in expected]
            return None
        assert enough
        assert self.changes == [(-1, copy.block) for copy in expected]
        assert len(reservation) == count
        assert len(dict.fromkeys(reservation.slots)) == len(reservation.slots)
        assert not any(self.in_transfer(slot) for slot in reservation.slots)
        held = Held(reservation, slots=list(reservation.slots), expires_ns=self.expiry(leased))
        taken = [copy.slot for copy in self.resident.values()] + [s for other in self.holds for s in other.slots]
        assert not set(held.slots) & set(taken)
        self.holds.append(held)
        return held

    @precondition(lambda self: self.pick(Reservation, 0) is not None)
    @rule(pick=picks, path=paths, start=st.integers(0, 4), count=st.integers(1, 5), near=st.booleans())
    def commit(self, pick: int, path: tuple[int, ...], start: int, count: int, near: bool) -> None:
        held = self.pick(Reservation, pick)
        assert held is not None
        start = min(start, self.prefix(path)) if near else min(start, len(path) - 1)
        if path[start : start + count]:
            self.fill_and_commit(held, path, start, count)

    def fill_and_commit(self, held: Held, path: tuple[int, ...], start: int, count: int) -> None:
        blocks = path[start : start + count]
        parent = path[start - 1] if start else None
        sums = [checksum(block) for block in blocks]
        if len(blocks) > len(held.slots):
            with pytest.raises(IntegrityError, match="slots that are left"):
                self.do(lambda: self.pool.commit(held.hold, blocks, parent, sums))
            return
        slots = held.slots[: len(blocks)]
        del held.slots[: len(blocks)]
        for slot, block in zip(slots, blocks, strict=True):
            fill(self.store, slot, block)
        seen = self.do(lambda: self.pool.commit(held.hold, blocks, parent, sums))
        assert (seen is not None) == (parent is None or parent in self.resident)
        if seen is None:
            assert self.changes == []
            return
        fresh: list[Copy] = []
        before = parent
        for slot, block in zip(slots, blocks, strict=True):
            if block not in self.resident:
                self.resident[block] = Copy(block, before, slot=slot)
                fresh.append(self.resident[block])
            before = block
        for copy in reversed(fresh):
            self.touch(copy)
        assert self.changes == [(1, copy.block) for copy in fresh]
        assert seen == [self.resident[block].slot for block in blocks], "where they lie, whoever wrote them"

    @precondition(has_hold)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        held = self.pick(Hold, pick)
        if held is not None:
            self.do(lambda: self.pool.release(held.hold))
            self.let_go(held)

    @precondition(lambda self: self.gone)
    @rule(pick=picks)
    def use_after_the_end(self, pick: int) -> None:
        """Late completions: a second release does nothing, everything else says that the hold is gone."""
        hold = self.gone[pick % len(self.gone)]
        self.do(lambda: self.pool.release(hold))
        late: list[Callable[[], object]] = [lambda: self.pool.renew(hold), lambda: self.pool.adopt(hold)]
        if isinstance(hold, Pin):
            late.append(lambda: self.pool.deepen(hold, PATHS[0]))
        elif isinstance(hold, Reservation):
            late.append(lambda: self.pool.commit(hold, (0,), None))
        for attempt in late:
            with pytest.raises(LeaseLost):
                self.do(attempt)

    # Leases

    @precondition(has_hold)
    @rule(pick=picks)
    def renew(self, pick: int) -> None:
        held = self.pick(Hold, pick)
        if held is not None:
            self.do(lambda: self.pool.renew(held.hold))
            if held.expires_ns is not None:
                held.expires_ns = self.now_ns + LEASE_NS

    @precondition(has_hold)
    @rule(pick=picks)
    def adopt(self, pick: int) -> None:
        held = self.pick(Hold, pick)
        if held is not None:
            self.do(lambda: self.pool.adopt(held.hold))
            held.expires_ns = None

    @rule(sixths=st.integers(1, 6))
    def pass_time(self, sixths: int) -> None:
        self.now_ns += sixths * LEASE_NS // 6
        self.loop.run(lambda: aio.sleep_until_ns(self.now_ns))
        due = [held for held in self.holds if held.expires_ns is not None and held.expires_ns <= self.now_ns]
        self.do(self.pool.expire)
        for held in due:
            assert held.hold.lost
            self.let_go(held)
        left = [held.expires_ns for held in self.holds if held.expires_ns is not None]
        assert self.pool.next_expiry_ns() == min(left, default=None)

    # Trouble

    @precondition(lambda self: len(self.resident) > 2)
    @rule(blocks=st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=2))
    def drop(self, blocks: list[int]) -> None:
        doomed = [block for block in blocks if block in self.resident]
        for block in doomed:
            doomed += [c.block for c in self.resident.values() if c.parent == block and c.block not in doomed]
        self.do(lambda: self.pool.drop(blocks))
        assert sorted(self.changes) == sorted((-1, block) for block in set(doomed))
        for block in dict.fromkeys(doomed):
            self.forget(self.resident[block])

    @precondition(lambda self: self.resident or any(held.slots for held in self.holds))
    @rule(pick=picks)
    def transfer_begins(self, pick: int) -> None:
        slots = [c.slot for c in self.resident.values()] + [slot for held in self.holds for slot in held.slots]
        chosen = (slots[pick % len(slots)], slots[(pick // 7) % len(slots)])
        region = self.store.regions(chosen)
        self.store.hold(region)
        self.in_flight.append(region)

    @precondition(lambda self: self.in_flight)
    @rule(pick=picks)
    def transfer_ends(self, pick: int) -> None:
        region = self.in_flight.pop(pick % len(self.in_flight))
        self.do(lambda: self.store.let_go(region))

    # After every step

    @invariant()
    def adds_up(self) -> None:
        self.pool.check_integrity()
        assert len(self.pool) == len(self.resident)
        assert self.reported == set(self.resident)
        assert self.pool.held == len(self.holds)
        for path in PATHS:
            assert self.do(lambda path=path: self.pool.match(path)) == self.prefix(path)

    @invariant()
    def regions_are_current_exactly_while_their_slots_have_not_changed_hands(self) -> None:
        for region, copies in self.regions:
            assert region.is_current() == (not any(copy.freed for copy in copies))
            if region.is_current():
                assert bytes_of(region) == [copy.block for copy in copies]

    @invariant()
    def what_is_pinned_and_not_dropped_stays_readable(self) -> None:
        for held in self.holds:
            if isinstance(held.hold, Pin) and held.hold.blocks and not self.was_dropped(held):
                region = self.do(lambda held=held: self.pool.region(held.hold.blocks))
                assert bytes_of(region) == list(held.hold.blocks)

    def teardown(self) -> None:
        if self.fails:
            self.do(self.pool.fail)
            self.pool.check_integrity()
            assert not any(region.is_current() for region, _ in self.regions)
            for question in (lambda: self.pool.match(PATHS[0]), lambda: self.pool.reserve(1, 1)):
                with pytest.raises(InstanceDown):
                    self.do(question)
        for held in list(self.holds):
            self.do(lambda held=held: self.pool.release(held.hold))
            self.let_go(held)
        for region in self.in_flight:
            self.do(lambda region=region: self.store.let_go(region))
        self.pool.check_idle()
        self.pool.check_integrity()
        if not self.fails:
            assert self.store.taken_slots == len(self.resident)
            everything = self.do(lambda: self.pool.reserve(1, CAPACITY))
            self.do(lambda: self.pool.release(everything))
        assert self.store.free_slots == CAPACITY
        assert (self.store.buffer() == 0xFF).all()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=250, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


# Cases worth a name of their own


def in_loop(test: Callable[[], Any]) -> Callable[[], None]:
    def wrapper() -> None:
        async def main() -> None:
            result = test()
            if result is not None:
                await result

        VirtualLoop().run(main)

    wrapper.__name__ = test.__name__
    return wrapper


def make(capacity: int = CAPACITY, low: float = 1.0, high: float = 1.0) -> Pool:
    return Pool("n", HostStore("n", capacity, 8, poison=True), LRU(), Static(low, high), NullRecorder(), LEASE_NS)


def put(pool: Pool, blocks: tuple[int, ...], start: int = 0) -> None:
    reservation = pool.reserve(0, len(blocks) - start)
    parent = blocks[start - 1] if start else None
    assert pool.commit(reservation, blocks[start:], parent, [checksum(block) for block in blocks[start:]])
    pool.release(reservation)


@in_loop
def test_the_oldest_chain_goes_from_its_end_before_younger_chains_are_touched():
    pool = make(9)
    old, young = (0, 1, 2, 3), (10, 11, 12, 13)
    put(pool, old)
    put(pool, young)
    pool.release(pool.reserve(0, 3))  # one was free
    assert (pool.match(old), pool.match(young)) == (2, 4)
    pool.release(pool.pin(1, old))  # a hit: now the other one is older
    pool.release(pool.reserve(0, 5))
    assert (pool.match(old), pool.match(young)) == (2, 2)
    for _ in range(10):
        pool.match(young)  # asking is no use
    pool.release(pool.reserve(0, 7))
    assert (pool.match(old), pool.match(young)) == (2, 0)


@in_loop
def test_a_chain_committed_chunk_by_chunk_goes_from_its_end_too():
    pool = make(8)
    chain = tuple(range(6))
    for start in (0, 2, 4):
        put(pool, chain[: start + 2], start)
    put(pool, (10, 11))
    pool.release(pool.reserve(0, 5))
    assert (pool.match(chain), pool.match((10, 11))) == (1, 2)


@in_loop
def test_a_refused_reservation_evicts_nothing():
    pool = make(8)
    put(pool, (0, 1, 2))
    put(pool, (10, 11, 12))
    pin = pool.pin(1, (0, 1, 2))
    with pytest.raises(PoolFull, match="6 blocks needed, 5 can be freed"):
        pool.reserve(2, 6)
    assert pool.match((10, 11, 12)) == 3
    pool.release(pin)


@in_loop
def test_a_pin_that_is_narrowed_lets_the_rest_go_and_keeps_its_beginning():
    pool = make(8)
    put(pool, (0, 1, 2, 3))
    pin = pool.pin(7, (0, 1, 2, 3))
    pool.narrow(pin, 2)
    assert pin.blocks == (0, 1)
    pool.reserve(8, 6)
    assert pool.contents().keys() == {0, 1}
    pool.narrow(pin, 0)
    pool.check_integrity()
    pool.reserve(9, 2)
    assert not len(pool)
    pool.release(pin)


@in_loop
def test_a_pin_is_not_narrowed_to_what_has_been_dropped():
    pool = make(8)
    put(pool, (0, 1, 2))
    pin = pool.pin(7, (0, 1, 2))
    pool.drop((1,))
    with pytest.raises(StaleRegion):
        pool.narrow(pin, 2)
    pool.narrow(pin, 1)
    pool.check_integrity()
    pool.release(pin)


@in_loop
def test_a_dropped_block_can_not_be_matched_and_comes_back_only_by_a_new_commit():
    pool = make(8)
    chain = (0, 1, 2, 3)
    put(pool, chain)
    pin = pool.pin(1, chain)
    region = pool.region(chain)
    pool.drop((1,))
    assert pool.match(chain) == 1
    assert len(pool.pin(2, chain)) == 1
    assert not region.is_current()
    with pytest.raises(StaleRegion):
        pool.region(chain)
    put(pool, chain, 1)
    assert pool.match(chain) == 4
    assert not region.is_current()
    pool.release(pin)
    assert pool.match(chain) == 4


@in_loop
def test_watermarks_evict_down_to_low_once_high_would_be_passed_but_never_refuse_what_fits():
    pool = make(8, low=0.5, high=0.75)
    for first in range(0, 60, 10):
        put(pool, (first,))
    assert len(pool) == 6  # 0.75 of 8
    put(pool, (100,))
    assert len(pool) == 4  # 0.5 of 8, the new one counted
    pins = [pool.pin(1, (block,)) for block in (30, 40, 50, 100)]
    put(pool, (200, 201, 202))  # nothing can go, and it fits
    assert len(pool) == 7
    for pin in pins:
        pool.release(pin)


@in_loop
async def test_a_waiter_is_woken_when_a_transfer_lets_go_of_the_last_slot():
    pool = make(2)
    put(pool, (0, 1))
    region = pool.region((0, 1))
    pool.store.hold(region)
    got: list[Reservation] = []

    def attempt() -> bool:
        try:
            got.append(pool.reserve(1, 1))
        except PoolFull:
            return False
        return True

    waiting = aio.spawn(pool.space.until(attempt, aio.now_ns() + 10**9), "waiter")
    await aio.sleep_ns(5)
    assert not got
    assert pool.match((0,)) == 0  # evicted, and the transfer still reads it
    pool.store.let_go(region)
    assert await waiting
    assert aio.now_ns() == 5
    pool.release(got[0])


@in_loop
async def test_waiters_are_told_when_the_node_dies():
    pool = make(2)
    reservation = pool.reserve(1, 2)
    outcome: list[str] = []

    def attempt() -> bool:
        try:
            pool.reserve(2, 1)
        except PoolFull:
            return False
        return True

    async def wait() -> None:
        try:
            await pool.space.until(attempt)
        except InstanceDown as problem:
            outcome.append(problem.instance)

    waiting = aio.spawn(wait(), "waiter")
    await aio.sleep_ns(1)
    pool.fail()
    await waiting
    assert outcome == ["n"]
    with pytest.raises(LeaseLost):
        reservation.check()
    pool.release(reservation)
    assert pool.store.free_slots == 2


def test_what_is_committed_out_of_slots_says_so():
    pool = make(2)

    async def main() -> None:
        reservation = pool.reserve(1, 1)
        with pytest.raises(IntegrityError, match="2 blocks for the 1 slots"):
            pool.commit(reservation, (0, 1), None)
        assert pool.match((0,)) == 0
        pool.release(reservation)

    VirtualLoop().run(main)
