from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.errors import IntegrityError, PoolFull
from mcjax.kvpool.base import Header
from mcjax.kvpool.stores.slots import SlotStore
from mcjax.types import Tier


def store(capacity: int = 4) -> SlotStore:
    return SlotStore("n", Tier.DRAM, capacity, 64)


def test_a_freed_slot_is_not_handed_out_again_while_a_transfer_holds_it():
    slots = store(3)
    mine = slots.reserve(2)
    region = slots.regions(mine)
    slots.hold(mine)
    slots.hold(mine[:1])
    slots.free(mine)
    assert not region.is_current()
    assert (slots.free_slots, slots.taken_slots) == (1, 0)
    with pytest.raises(PoolFull):
        slots.reserve(2)
    with pytest.raises(IntegrityError, match="transfers still hold"):
        slots.check_idle()
    slots.let_go(mine)
    assert slots.free_slots == 2  # the second transfer still has the other one
    assert mine[0] not in slots.reserve(2)
    slots.let_go(mine[:1])
    assert slots.reserve(1) == mine[:1]
    slots.check_integrity()
    slots.check_idle()


def test_who_hands_slots_out_is_told_when_freed_ones_come_back_and_only_then():
    slots, calls = store(), list[int]()
    slots.on_space = lambda: calls.append(slots.free_slots)
    mine = slots.reserve(2)
    slots.hold(mine)
    slots.let_go(mine)
    assert calls == []  # nobody has freed them
    slots.hold(mine)
    slots.free(mine)
    assert calls == []
    slots.let_go(mine)
    assert calls == [4]


def test_reserving_too_many_takes_none():
    slots = store(3)
    with pytest.raises(PoolFull, match="4 blocks needed, 3 can be freed"):
        slots.reserve(4)
    assert slots.free_slots == 3
    assert slots.reserve(0) == []


def test_a_header_lives_as_long_as_the_slot_and_wiping_makes_every_region_stale():
    slots = store()
    (first, second) = slots.reserve(2)
    slots.commit([first], [7], [b"sum"])
    assert slots.header(first) == Header(7, b"sum")
    assert slots.header(second) is None
    region = slots.regions([first])
    slots.free([first])
    assert slots.header(first) is None
    again = slots.regions([second])
    slots.wipe()
    assert not region.is_current()
    assert not again.is_current()


@given(st.lists(st.tuples(st.sampled_from(["reserve", "free", "hold", "let_go"]), st.integers(0, 5)), max_size=60))
@settings(max_examples=100)
def test_every_slot_is_exactly_one_of_free_taken_leaving(steps):
    slots = store(6)
    owned: list[int] = []
    holds: list[int] = []
    for action, pick in steps:
        if action == "reserve":
            if pick <= slots.free_slots:
                given_out = slots.reserve(pick)
                assert not set(given_out) & {*owned, *holds}
                owned += given_out
        elif action == "free" and owned:
            slots.free([owned.pop(pick % len(owned))])
        elif action == "hold" and owned:
            holds.append(owned[pick % len(owned)])
            slots.hold(holds[-1:])
        elif action == "let_go" and holds:
            slots.let_go([holds.pop(pick % len(holds))])
        slots.check_integrity()
        assert slots.taken_slots == len(owned)
        assert slots.free_slots == 6 - len({*owned, *holds})
    slots.free(owned)
    slots.let_go(holds)
    slots.check_idle()
    assert slots.free_slots == 6
