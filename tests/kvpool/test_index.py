"""The index of resident blocks: whole, whatever goes in; what leaves goes suffix first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mcjax.kvpool.index import BlockIndex

rows = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True), min_size=1, max_size=8)
"""Also rows that are no chains: a trace may give one id to blocks behind different prefixes."""


@given(rows)
def test_rows_of_any_ids_leave_a_whole_index(rows: list[list[int]]) -> None:
    index = BlockIndex()
    free = iter(range(1000))
    where: dict[int, int] = {}
    for blocks in rows:
        slots = [next(free) for _ in blocks]
        new, new_slots, duplicates = index.insert(blocks, slots, None, ())
        assert list(new) == [block for block in blocks if block not in where]
        assert sorted([*new_slots, *duplicates]) == slots
        where.update(zip(new, new_slots, strict=True))
        index.check_integrity("index")
        assert index.leading(blocks) == len(blocks)
        assert index.slots_of(blocks) == [where[block] for block in blocks]
    assert index.slots == where


@given(rows, st.integers(1, 12), st.data())
def test_victims_are_leaves_again_and_again_and_never_what_a_pin_needs(
    rows: list[list[int]], count: int, data: st.DataObject
) -> None:
    index = BlockIndex()
    for number, blocks in enumerate(rows):
        index.insert(blocks, [100 * number + at for at in range(len(blocks))], None, ())
    resident = list(index.slots)
    pinned = data.draw(st.none() | st.sampled_from(resident))
    if pinned is not None:
        index.anchor(pinned)
    order = data.draw(st.permutations(resident))
    chosen = index.victims(iter(order), count)
    assert pinned not in chosen
    assert len(dict.fromkeys(chosen)) == len(chosen) <= count
    if len(chosen) < count:
        kept = [block for block in resident if block not in chosen]
        assert pinned is None or pinned in kept
        assert pinned is not None or not kept, "without pins everything can go"
    slots = index.slots_of(chosen)
    assert index.remove(chosen) == (slots, [])
    index.check_integrity("index")


def test_a_removed_block_that_is_pinned_keeps_its_slot() -> None:
    index = BlockIndex()
    index.insert((1, 2), (10, 11), None, (b"a", b"b"))
    anchor = index.anchor(2)
    assert index.checksums_of((1, 2)) == (b"a", b"b")
    assert index.continued_by((1,)) == [1, 2]
    assert index.remove((2, 1)) == ([10], [anchor])
    assert (anchor.slot, anchor.detached) == (11, True)
    assert not index.slots
    assert not index.anchors
