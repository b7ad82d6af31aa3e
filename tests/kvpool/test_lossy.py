"""Lossy blocks: who does not accept them never gets one, and exact ones take their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.backends.check.store import ByteStore
from mcjax.backends.virtual import VirtualLoop
from mcjax.errors import PoolFull
from mcjax.kvpool.base import Stored
from mcjax.kvpool.encodings.base import BlockLayout
from mcjax.kvpool.encodings.int8 import Int8
from mcjax.kvpool.eviction.lru import LRU
from mcjax.kvpool.pool import Pool
from mcjax.kvpool.stores.null import NullStore
from mcjax.kvpool.watermark.static import Static
from mcjax.types import NullRecorder, Tier

CHAIN = (0, 1, 2, 3, 4)
EXACT, ROUNDED = 1, 2


def inside(test: Callable[[], Any]) -> Callable[[], None]:
    """Run a test inside a loop, since pools look at the time."""

    def wrapper() -> None:
        async def main() -> None:
            test()

        VirtualLoop().run(main)

    wrapper.__name__ = test.__name__
    return wrapper


def make(capacity: int = 16, on_change: Callable[[int, Sequence[int]], None] = lambda sign, blocks: None) -> Pool:
    return Pool("n", ByteStore("n", Tier.DRAM, capacity, 4), LRU(), Static(), NullRecorder(), 1000, on_change)


def put(pool: Pool, blocks: tuple[int, ...], start: int = 0, lossy: bool = False) -> list[int] | None:
    """Commit blocks `start ..` of a chain; their bytes say whether they are exact."""
    reservation = pool.reserve(0, len(blocks) - start)
    buffer: Any = pool.store.buffer()
    kind = ROUNDED if lossy else EXACT
    for slot, block in zip(reservation.slots, blocks[start:], strict=True):
        buffer[slot] = (kind, block, 0, 0)
    sums = [b"%d of %d" % (kind, block) for block in blocks[start:]]
    slots = pool.commit(reservation, blocks[start:], blocks[start - 1] if start else None, sums, lossy)
    pool.release(reservation)
    pool.check_integrity()
    return slots


def kinds(pool: Pool, blocks: tuple[int, ...]) -> list[int]:
    """What the bytes of resident blocks say, and that their checksums say the same."""
    buffer: Any = pool.store.buffer()
    found = [tuple(int(value) for value in buffer[slot]) for slot in pool.region(blocks).slots]
    assert [block for _, block, *_ in found] == list(blocks)
    assert pool.checksums(blocks) == tuple(b"%d of %d" % (kind, block) for kind, block, *_ in found)
    return [kind for kind, *_ in found]


@inside
def test_a_match_ends_before_the_first_lossy_block_for_who_does_not_accept_them():
    pool = make()
    put(pool, CHAIN[:2])
    put(pool, CHAIN[:4], 2, lossy=True)
    assert (pool.match(CHAIN), pool.match(CHAIN, accepts_lossy=False)) == (4, 2)
    exact = pool.pin(1, CHAIN, accepts_lossy=False)
    assert exact.blocks == CHAIN[:2]
    pool.deepen(exact, CHAIN)
    assert exact.blocks == CHAIN[:2], "nor does a pin come to cover one later"
    assert pool.pin(2, CHAIN).blocks == CHAIN[:4]
    assert pool.is_lossy(CHAIN[1:3])
    assert not pool.is_lossy(CHAIN[:2])


@inside
def test_what_continues_a_lossy_block_is_lossy_whatever_it_says():
    pool = make()
    put(pool, CHAIN[:1], lossy=True)
    put(pool, CHAIN[:3], 1, lossy=False)
    assert pool.match(CHAIN) == 3
    assert pool.match(CHAIN, accepts_lossy=False) == 0


@inside
def test_exact_blocks_take_the_place_of_lossy_ones_and_who_read_those_finds_out():
    pool = make()
    put(pool, CHAIN[:4], lossy=True)
    pin = pool.pin(1, CHAIN[:3])
    before = pool.region(CHAIN[:3])
    pool.store.hold(before)
    free = pool.store.free_slots
    assert put(pool, CHAIN[:3]) == list(pool.region(CHAIN[:3]).slots)
    assert kinds(pool, CHAIN[:4]) == [EXACT] * 3 + [ROUNDED]
    assert pool.match(CHAIN, accepts_lossy=False) == 3
    assert not before.is_current(), "a transfer that was reading the old ones fails, and does not mix them"
    assert pool.store.free_slots == free - 3
    pool.store.let_go(before)
    assert pool.store.free_slots == free
    pool.check_integrity()
    pool.release(pin)
    pool.drop(CHAIN[:1])
    assert pool.store.taken_slots == 0
    pool.check_integrity()


@inside
def test_exact_blocks_that_nobody_has_yet_are_committed_beside_lossy_ones():
    pool = make()
    put(pool, CHAIN[:2], lossy=True)
    put(pool, (10, 11))
    assert pool.match((10, 11), accepts_lossy=False) == 2
    assert kinds(pool, CHAIN[:2]) == [ROUNDED] * 2


@inside
def test_a_lossy_block_never_takes_the_place_of_an_exact_one():
    pool = make()
    put(pool, CHAIN[:3])
    here = list(pool.region(CHAIN[:3]).slots)
    assert put(pool, CHAIN, lossy=True) == [*here, *pool.region(CHAIN[3:]).slots]
    assert kinds(pool, CHAIN) == [EXACT] * 3 + [ROUNDED] * 2
    assert pool.match(CHAIN, accepts_lossy=False) == 3


@inside
def test_everything_in_a_store_that_rounds_is_lossy_what_it_was_opened_with_too():
    class Reopened(NullStore):
        def recovered(self):
            return [Stored(slot, CHAIN[slot], CHAIN[slot - 1] if slot else None, b"") for slot in range(2)]

    layout = BlockLayout("float32", 1, 1, 4)
    store = Reopened("n", Tier.SSD, 4, layout.quantised_bytes, packer=Int8(layout))
    store._free = [3, 2]
    store.commit([0, 1], CHAIN[:2], [b"", b""])
    pool = Pool("n", store, LRU(), Static(), NullRecorder(), 1000)
    reservation = pool.reserve(0, 1)
    assert pool.commit(reservation, CHAIN[2:3], CHAIN[1], [b""])
    assert (pool.match(CHAIN), pool.match(CHAIN, accepts_lossy=False)) == (3, 0)
    pool.check_integrity()


@inside
def test_where_nothing_is_lossy_nothing_is_remembered():
    pool = make()
    put(pool, CHAIN)
    assert not pool.holds_lossy
    assert not pool._index.lossy
    put(pool, (10, 11), lossy=True)
    pool.drop((10,))
    assert not pool.holds_lossy, "what has left is forgotten"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put lossy", "drop", "pin", "release", "fill"]), st.integers(0, 4), st.booleans()
    ),
    max_size=30,
)


@given(STEPS)
@settings(max_examples=150)
def test_whatever_happens_nobody_gets_a_rounded_byte_who_does_not_accept_it(steps):
    """Against a model that keeps, a block, whether it is lossy; the bytes are looked at, not the pool's word."""

    @inside
    def play():
        model: dict[int, bool] = {}
        pins: list[Any] = []

        def on_change(sign: int, blocks: Sequence[int]) -> None:
            for block in blocks if sign < 0 else ():  # what was evicted may come back in the same breath
                model.pop(block, None)

        pool = make(8, on_change)
        for action, depth, accepts in steps:
            blocks = CHAIN[: depth + 1]
            try:
                if action.startswith("put"):
                    start = pool.match(blocks, accepts) if not action.endswith("lossy") else 0
                    lossy = action.endswith("lossy")
                    if start < len(blocks) and put(pool, blocks, start, lossy) is not None:
                        for block in blocks[start:]:
                            behind = block and model.get(block - 1, False)
                            model[block] = model.get(block, True) and (lossy or bool(behind))
                elif action == "drop":
                    pool.drop(blocks[-1:])
                elif action == "pin":
                    pins.append(pool.pin(1, blocks, accepts_lossy=accepts))
                elif action == "release" and pins:
                    pool.release(pins.pop(depth % len(pins)))
                elif action == "fill":
                    pool.release(pool.reserve(9, depth + 3))
            except PoolFull:
                pass
            pool.check_integrity()
            present = pool.match(CHAIN)
            for count, wants_exact in ((present, False), (pool.match(CHAIN, accepts_lossy=False), True)):
                found = kinds(pool, CHAIN[:count])
                assert not wants_exact or found == [EXACT] * count
            flags = [model[block] for block in CHAIN[:present]]
            expected = flags.index(True) if True in flags else present
            assert pool.match(CHAIN, accepts_lossy=False) == expected
            for pin in pins:
                if not pin.accepts_lossy and all(block in pool for block in pin.blocks):
                    assert len(pin) <= present
        for pin in pins:
            pool.release(pin)
        pool.check_idle()

    play()


def test_the_pool_of_a_store_without_checksums_refines_too():
    async def main() -> None:
        pool = Pool("n", NullStore("n", Tier.DRAM, 8, 4), LRU(), Static(), NullRecorder(), 1000)
        for lossy in (True, False):
            reservation = pool.reserve(0, 3)
            assert pool.commit(reservation, CHAIN[:3], None, [b""] * 3, lossy)
            pool.release(reservation)
            pool.check_integrity()
            assert pool.match(CHAIN, accepts_lossy=False) == (0 if lossy else 3)
        assert pool.store.taken_slots == 3

    VirtualLoop().run(main)


@pytest.mark.parametrize("lossy", [False, True])
def test_lent_slots_that_become_blocks_may_be_lossy(lossy):
    async def main() -> None:
        pool = Pool("n", NullStore("n", Tier.HBM, 8, 4), LRU(), Static(), NullRecorder(), 1000)
        pool.keep(0, pool.lend(0, 2), CHAIN[:2], None, lossy=lossy)
        assert pool.is_lossy(CHAIN[:2]) == lossy
        pool.check_integrity()

    VirtualLoop().run(main)
