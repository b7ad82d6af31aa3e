"""Strategies that choose paths: what stays near, how it is striped, and that every block goes somewhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcjax.transfer.base import Rail
from mcjax.transfer.paths.base import Candidate, PathChoice, apportion
from mcjax.transfer.paths.least_queued import LeastQueued
from mcjax.transfer.paths.nearest import Nearest
from mcjax.transfer.paths.striped import Striped

MIB = 1 << 20


def candidate(
    queued_bytes: int = 0, distance: int = 0, crosses: bool = False, rate: float = 1e9, latency_s: float = 0.0
) -> Candidate:
    return Candidate("path", Rail("a", "b", distance, crosses), queued_bytes, rate, latency_s)


STRATEGIES: list[PathChoice] = [Nearest(), Striped(), LeastQueued()]

candidates_of = st.lists(
    st.builds(
        candidate,
        st.integers(0, 1 << 40),
        st.integers(0, 3),
        st.booleans(),
        st.floats(1e3, 1e12),
        st.floats(0, 1),
    ),
    min_size=2,
    max_size=8,
)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: type(strategy).__name__)
@given(blocks=st.integers(1, 5000), block_bytes=st.integers(1, 8 * MIB), candidates=candidates_of)
def test_every_block_goes_somewhere_and_inside_the_domain_if_it_can(
    strategy: PathChoice, blocks: int, block_bytes: int, candidates: list[Candidate]
) -> None:
    counts = strategy.choose(blocks, block_bytes, candidates)
    assert len(counts) == len(candidates)
    assert min(counts) >= 0
    assert sum(counts) == blocks
    if not all(each.rail.crosses for each in candidates):
        crossing = [count for count, each in zip(counts, candidates, strict=True) if each.rail.crosses]
        assert not any(crossing)


def test_nearest_goes_by_distance_then_by_queue() -> None:
    choice = Nearest()
    assert choice.choose(9, MIB, [candidate(0, 1), candidate(500, 0), candidate(400, 0)]) == [0, 0, 9]
    assert choice.choose(9, MIB, [candidate(0, 1), candidate(0, 0, crosses=True)]) == [9, 0]


def test_striped_gives_each_path_its_share_within_a_block() -> None:
    rates = [1e9, 3e9, 2e9, 4e9]
    counts = Striped().choose(1003, MIB, [candidate(rate=rate) for rate in rates])
    for count, rate in zip(counts, rates, strict=True):
        assert abs(count - 1003 * rate / 10e9) < 1


def test_small_copies_are_not_striped() -> None:
    four = [candidate(rate=1e9 + index) for index in range(4)]
    assert Striped(stripe_bytes=MIB).choose(7, 64 << 10, four) == [0, 0, 0, 7]
    assert sorted(LeastQueued(stripe_bytes=MIB).choose(7, 64 << 10, four)) == [0, 0, 0, 7]
    assert min(LeastQueued(stripe_bytes=MIB).choose(4, MIB, [candidate() for _ in range(4)])) == 1


def test_a_far_nic_carries_less() -> None:
    near, far = Striped(far_penalty=1.0).choose(300, MIB, [candidate(), candidate(distance=1)])
    assert (near, far) == (200, 100)


def test_least_queued_has_all_parts_arrive_together() -> None:
    queued = [0, 100 * MIB, 50 * MIB, 4000 * MIB]
    counts = LeastQueued().choose(600, MIB, [candidate(each) for each in queued])
    assert counts[3] == 0, "who is busy longer than the copy takes gets nothing"
    ends = [count + queue // MIB for count, queue in zip(counts[:3], queued, strict=False)]
    assert max(ends) - min(ends) <= 1


def test_least_queued_gives_nothing_to_a_path_that_would_begin_too_late() -> None:
    assert LeastQueued().choose(10, MIB, [candidate(), candidate(latency_s=1.0)]) == [10, 0]


@given(
    blocks=st.integers(0, 10_000),
    weights=st.lists(st.floats(0, 1e12), min_size=1, max_size=9),
    least=st.integers(1, 50),
)
def test_apportioning_is_exact_within_a_block_and_leaves_no_crumbs(
    blocks: int, weights: list[float], least: int
) -> None:
    counts = apportion(blocks, weights, least)
    assert sum(counts) == blocks
    assert min(counts) >= 0
    if sum(1 for count in counts if count) > 1:
        assert min(count for count in counts if count) >= least - 1
