"""Two KV groups and two shards, faked: the foundation has one of each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcjax.backends.virtual import VirtualLoop
from mcjax.kvpool.eviction.lru import LRU
from mcjax.kvpool.groups import Shard, boundary, common_prefix, complete
from mcjax.kvpool.pool import Pool
from mcjax.kvpool.stores.slots import SlotStore
from mcjax.kvpool.watermark.static import Static
from mcjax.types import KVGroup, NullRecorder, Tier

FULL = KVGroup("full", "full", 64)
STATE = KVGroup("state", "state", 16, block_multiple=4)


def test_a_match_ends_at_the_common_boundary_of_all_groups():
    assert common_prefix([7], [FULL]) == 7
    assert common_prefix([7, 9], [FULL, STATE]) == 4
    assert common_prefix([3, 9], [FULL, STATE]) == 0
    assert common_prefix([9, 8], [FULL, STATE]) == 8
    six = KVGroup("window", "window", 8, block_multiple=6)
    assert common_prefix([23, 23, 23], [FULL, STATE, six]) == 12
    with pytest.raises(ValueError, match="1 residencies for 2 groups"):
        common_prefix([7], [FULL, STATE])


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 6)), min_size=1, max_size=4))
def test_it_is_the_longest_prefix_that_suits_every_group(pairs):
    groups = [KVGroup(f"g{index}", block_multiple=multiple) for index, (_, multiple) in enumerate(pairs)]
    residencies = [blocks for blocks, _ in pairs]
    fits = [end for end in range(51) if all(end <= blocks and end % multiple == 0 for blocks, multiple in pairs)]
    assert common_prefix(residencies, groups) == max(fits)
    assert boundary(groups) >= max(multiple for _, multiple in pairs)


def test_a_replica_exists_only_when_all_its_shards_do():
    wanted = [Shard(rank, 4 * rank, 4 * rank + 4) for rank in range(2)]
    assert not complete([], wanted)
    assert not complete(wanted[:1], wanted)
    assert not complete([wanted[0], Shard(1, 0, 4)], wanted)  # the right rank, other heads
    assert complete(wanted[::-1], wanted)
    assert complete([*wanted, Shard(2, 8, 12)], wanted)


def test_a_pool_with_two_groups_matches_to_their_boundary_and_still_keeps_what_lies_behind_it():
    async def main() -> None:
        store = SlotStore("n", Tier.DRAM, 8, 64)
        pool = Pool("n", store, LRU(), Static(), NullRecorder(), 1000, groups=(FULL, STATE))
        chain = tuple(range(7))
        pin = pool.pin(1, chain)
        reservation = pool.reserve(1, 7)
        for first in range(7):  # a writer goes on block by block, between boundaries too
            assert pool.commit(reservation, chain[first : first + 1], chain[first - 1] if first else None)
            pool.deepen(pin, chain[: first + 1])
            assert len(pin) == first + 1
            assert pool.match(chain) == (first + 1) // 4 * 4
        reader = pool.pin(2, chain)
        assert reader.blocks == chain[:4]
        pool.release(pin)
        pool.release(reservation)
        pool.release(pool.reserve(3, 4))  # three that nobody pins may go
        assert pool.match(chain) == 4
        pool.release(reader)
        pool.check_idle()
        pool.check_integrity()

    VirtualLoop().run(main)
