"""The script behind the tables of `docs/compare.md`, with few trials."""

from __future__ import annotations


def test_shares_of_intervals_and_marks(module):
    intervals = module("intervals")
    share = intervals.covered(intervals.DIFFERENCES["normal"], 10, trials=200, draws=500)
    assert 0.88 < share < 1
    assert intervals.covered(lambda rng, shape: rng.normal(5, 1, shape), 10, trials=20, draws=500) == 0
    assert intervals.marked(2, 8, 4.0, trials=20, draws=500) > 0.8
    assert intervals.marked(2, 5, 4.0, trials=5, draws=500) == 0  # too few pairs


def test_blocks_of_simulated_runs(module):
    intervals = module("intervals")
    assert set(intervals.held(seeds=2, sessions=40)) == set(intervals.FIGURES)
