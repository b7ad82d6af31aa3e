"""What pools had and lost is remembered, the latest at least, and never more than twice what they can hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mcjax.kvpool.gone import Gone
from mcjax.types import Miss

NOTES = st.lists(
    st.tuples(st.lists(st.integers(0, 30), max_size=4, unique=True), st.sampled_from([Miss.EVICTED, Miss.FAULT]))
)


@given(NOTES, st.integers(4, 12))
def test_the_latest_are_remembered_with_their_last_cause(notes: list[tuple[list[int], Miss]], capacity: int) -> None:
    gone = Gone()
    gone.widen(capacity)
    noted: list[int] = []
    latest: dict[int, Miss] = {}
    for blocks, cause in notes:
        gone.note(blocks, cause)
        noted += blocks
        latest.update(dict.fromkeys(blocks, cause))
    assert len(gone) <= 2 * capacity
    sure = noted[max(0, len(noted) - capacity + 4) :]  # a run of up to four is noted as a whole
    for block in range(31):
        found = list(gone.causes([block]))
        assert found == [latest[block]] if block in sure else found in ([], [latest.get(block)])


def test_only_leading_blocks_count() -> None:
    gone = Gone()
    gone.widen(10)
    gone.note([1, 2], Miss.EVICTED)
    gone.note([4], Miss.FAULT)
    assert list(gone.causes([1, 2, 3, 4])) == [Miss.EVICTED, Miss.EVICTED]
    assert list(gone.causes([4, 1])) == [Miss.FAULT, Miss.EVICTED]


def test_each_pool_widens_the_memory() -> None:
    gone = Gone()
    for _ in range(2):
        gone.widen(3)
    for block in range(20):
        gone.note([block], Miss.EVICTED)
    assert [block for block in range(20) if list(gone.causes([block]))] == list(range(12, 20))
