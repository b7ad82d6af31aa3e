"""Exact percentiles and interval unions, against NumPy and against brute force."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mcjax.track.statistics import at_ranks, merge, overlap_ns, spread_of_pieces_s, spread_s

INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=25)


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=200))
def test_spread_agrees_with_numpy(values: list[int]) -> None:
    spread = spread_s(np.array(values, np.int64))
    for percent in (50, 90, 99):
        expected = float(np.percentile(np.array(values, np.float64), percent)) / 1e9
        found = spread[f"p{percent}"]
        assert found is not None
        assert abs(found - expected) <= 1e-12 * max(expected, 1)
    assert spread["mean"] == sum(values) / (len(values) * 10**9)


@given(st.lists(st.lists(st.integers(0, 2**60)), min_size=1, max_size=9), st.data())
def test_ranks_are_found_without_sorting(pieces: list[list[int]], data: st.DataObject) -> None:
    ordered = sorted(value for piece in pieces for value in piece)
    arrays = [np.array(piece, np.int64) for piece in pieces]
    if ordered:
        ranks = data.draw(st.lists(st.integers(0, len(ordered) - 1), min_size=1))
        assert at_ranks(lambda: arrays, ordered[-1], ranks) == {rank: ordered[rank] for rank in ranks}
    assert spread_of_pieces_s(lambda: arrays) == spread_s(np.array(ordered, np.int64))


def test_spread_of_nothing_is_null() -> None:
    assert spread_s(np.empty(0, np.int64)) == {"mean": None, "p50": None, "p90": None, "p99": None}


def test_spread_does_not_depend_on_order() -> None:
    values = np.random.default_rng(0).integers(0, 10**10, 999)
    assert spread_s(values) == spread_s(np.sort(values)[::-1].copy())


@given(INTERVALS, INTERVALS)
def test_overlap_agrees_with_counting(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    def columns(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        starts = np.array([start for start, _ in pairs], np.int64)
        return starts, starts + np.array([length for _, length in pairs], np.int64)

    union = merge(*columns(others))
    inside = np.zeros(100, bool)
    for start, length in others:
        inside[start : start + length] = True
    found = overlap_ns(*columns(some), union)
    assert found.tolist() == [int(inside[start : start + length].sum()) for start, length in some]
    assert int((union[1] - union[0]).sum()) == int(inside.sum())
    assert (union[0][1:] > union[1][:-1]).all()
