from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.errors import IntegrityError, PoolFull
from mcjax.kvpool.base import Header
from mcjax.kvpool.stores.slots import SlotStore
from mcjax.transfer.base import Region
from mcjax.types import Tier


def store(capacity: int = 4) -> SlotStore:
    return SlotStore("n", Tier.DRAM, capacity, 64)


def test_a_freed_slot_is_not_handed_out_again_while_a_transfer_holds_it():
    slots = store(3)
    mine = slots.reserve(2)
    region = slots.regions(mine)
    slots.hold(region)
    again = slots.regions(mine[:1])
    slots.hold(again)
    slots.free(mine)
    assert not region.is_current()
    assert (slots.free_slots, slots.taken_slots) == (1, 0)
    with pytest.raises(PoolFull):
        slots.reserve(2)
    with pytest.raises(IntegrityError, match="transfers still hold"):
        slots.check_idle()
    slots.let_go(region)
    assert slots.free_slots == 2  # the second transfer still has the other one
    assert mine[0] not in slots.reserve(2)
    slots.let_go(again)
    assert slots.reserve(1) == mine[:1]
    slots.check_integrity()
    slots.check_idle()


def test_who_hands_slots_out_is_told_when_freed_ones_come_back_and_only_then():
    slots, calls = store(), list[int]()
    slots.on_space = lambda: calls.append(slots.free_slots)
    mine = slots.reserve(2)
    region = slots.regions(mine)
    slots.hold(region)
    slots.let_go(region)
    assert calls == []  # nobody has freed them
    slots.hold(region)
    slots.hold(region)  # two transfers of one region: the first to end does not free it
    slots.free(mine)
    slots.let_go(region)
    assert calls == []
    slots.let_go(region)
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


def test_a_region_stays_current_while_other_slots_change_hands():
    slots = store(6)
    mine, others = slots.reserve(2), slots.reserve(2)
    region = slots.regions(mine)
    for _ in range(3):
        slots.free(others)
        assert region.is_current()
        others = slots.reserve(2)
    slots.free(mine[1:])
    assert not region.is_current()
    assert not region.is_current()
    assert slots.regions(mine[:1]).is_current()


class ByTheSlot:
    """The books of a store the plain way: a generation and a count of holds for each slot."""

    def __init__(self, capacity: int):
        self.generation = [0] * capacity
        self.holds = [0] * capacity
        self.taken = [False] * capacity

    def free(self, slot: int) -> None:
        self.generation[slot] += 1
        self.taken[slot] = False

    @property
    def to_be_had(self) -> set[int]:
        return {slot for slot, taken in enumerate(self.taken) if not taken and not self.holds[slot]}


ACTIONS = st.tuples(
    st.sampled_from(["reserve", "free", "hold", "hold again", "let_go", "region", "look", "wipe"]),
    st.lists(st.integers(0, 7), min_size=1, max_size=4),
)


@given(st.lists(ACTIONS, max_size=60))
@settings(max_examples=300)
def test_agrees_with_generations_and_holds_kept_for_each_slot(steps: list[tuple[str, list[int]]]):
    slots, plain = store(8), ByTheSlot(8)
    regions: list[tuple[Region, list[int]]] = []
    held: list[Region] = []
    woken: list[int] = []
    slots.on_space = lambda: woken.append(slots.free_slots)
    for action, picks in steps:
        taken = [slot for slot in range(8) if plain.taken[slot]]
        picked = list(dict.fromkeys(taken[pick % len(taken)] for pick in picks)) if taken else []
        pick = picks[0]
        if action == "reserve" and pick <= slots.free_slots:
            for slot in slots.reserve(pick):
                assert slot in plain.to_be_had
                plain.taken[slot] = True
        elif action == "free":
            slots.free(picked)
            for slot in picked:
                plain.free(slot)
        elif action == "region" and picked:
            regions.append((slots.regions(picked), [plain.generation[slot] for slot in picked]))
        elif action == "hold" and regions and regions[pick % len(regions)][0].is_current():
            held.append(regions[pick % len(regions)][0])
            slots.hold(held[-1])
            for slot in held[-1].slots:
                plain.holds[slot] += 1
        elif action == "hold again" and held:
            # Some of the same slots, in another region: overlapping holds are counted a slot.
            region = slots.regions(held[pick % len(held)].slots[:2])
            held.append(region)
            slots.hold(region)
            for slot in region.slots:
                plain.holds[slot] += 1
        elif action == "let_go" and held:
            before = plain.to_be_had
            region = held.pop(pick % len(held))
            for slot in region.slots:
                plain.holds[slot] -= 1
            woken.clear()
            slots.let_go(region)
            assert bool(woken) == (plain.to_be_had != before), "told exactly when freed slots have come back"
        elif action == "look":
            for region, generations in regions:
                assert region.is_current() == ([plain.generation[slot] for slot in region.slots] == generations)
        elif action == "wipe":
            slots.wipe()
            plain.generation = [generation + 1 for generation in plain.generation]
        slots.check_integrity()
        assert slots.taken_slots == sum(plain.taken)
        assert slots.free_slots == len(plain.to_be_had)
        for region, generations in regions[pick % 3 :: 3]:  # not all: one that is looked at seldom must not differ
            assert region.is_current() == ([plain.generation[slot] for slot in region.slots] == generations)
    for region in held:
        slots.let_go(region)
    slots.free([slot for slot in range(8) if plain.taken[slot]])
    slots.check_idle()
    assert slots.free_slots == 8


def test_settled_slots_stay_their_owners_and_take_nothing_more() -> None:
    store = SlotStore("n", Tier.DRAM, 4, 8)
    slots = store.reserve(2)
    before, other = store.regions(slots), store.regions(store.reserve(1))
    store.settle(slots)
    assert not before.is_current()
    assert other.is_current()
    assert store.regions(slots).is_current()
    assert store.taken_slots == 3
    store.check_integrity()
