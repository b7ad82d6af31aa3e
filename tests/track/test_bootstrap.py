"""Bootstrap intervals: what they cover, what they refuse to say, and order statistics of weighted blocks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcjax.track.compare.bootstrap import (
    UNBOUNDED,
    Interval,
    block_counts,
    enough_unpaired,
    paired,
    pairs_needed,
    percentiles,
    resamples,
    t_quantile,
    unpaired,
)
from mcjax.track.compare.order import BlockOrder

SAMPLERS = {
    "normal": lambda rng, size: rng.normal(size=size),
    "exponential": lambda rng, size: rng.exponential(size=size) - 1,
}


def coverage(sampler: str, pairs: int, trials: int, draws: int, error: float = 0.05, shift: float = 0.0) -> float:
    """How often the interval of the mean difference holds `0` when the truth is `shift`, in standard deviations."""
    rng = np.random.default_rng(pairs)
    chosen = resamples(draws, pairs, rng)
    samples = SAMPLERS[sampler](rng, (trials, pairs)) + shift
    return sum(not paired(sample, error, chosen).excludes_zero for sample in samples) / trials


@pytest.mark.parametrize(("sampler", "least"), [("normal", 0.92), ("exponential", 0.89)])
def test_intervals_of_few_pairs_cover_the_truth(sampler: str, least: float) -> None:
    for pairs in (6, 10, 20):
        assert coverage(sampler, pairs, trials=400, draws=1000) >= least


def test_power_rises_with_the_effect() -> None:
    missed = [coverage("normal", 8, trials=200, draws=500, shift=shift) for shift in (0.0, 0.5, 1.0, 2.0)]
    assert missed == sorted(missed, reverse=True)
    assert missed[0] > 0.9
    assert missed[-1] < 0.1


@pytest.mark.check_long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("error", [0.05, 0.0125])
def test_coverage_at_length(sampler: str, error: float) -> None:
    for pairs in (8, 10, 20):
        missed = 1 - coverage(sampler, pairs, trials=2000, draws=2000, error=error)
        assert missed < error + (0.02 if sampler == "normal" else 0.04)


def test_equal_differences_are_certain_and_near_equal_ones_are_not() -> None:
    chosen = resamples(2000, 6, np.random.default_rng(0))
    assert paired(np.full(6, 2.0), 0.05, chosen) == Interval(2.0, 2.0)
    few = resamples(2000, 5, np.random.default_rng(0))
    assert paired(np.full(5, 2.0), 0.05, few) == UNBOUNDED  # one in sixteen times, that is chance
    assert paired(np.zeros(5), 0.05, few) == Interval(0.0, 0.0)
    assert unpaired(np.full(3, 1.0), np.full(3, 2.0), 0.05, (few, few)) == UNBOUNDED
    assert unpaired(np.full(4, 1.0), np.full(4, 2.0), 0.05, (few, few)) == Interval(1.0, 1.0)
    # Five of six agree, and one is far off: resamples of the five alone say nothing of how far.
    odd = paired(np.array([5.0, 5, 5, 5, 5, -1]), 0.05, chosen)
    assert odd.low == -math.inf
    assert not odd.excludes_zero


def test_two_samples_by_themselves() -> None:
    rng = np.random.default_rng(1)
    chosen = resamples(1000, 8, rng), resamples(1000, 9, rng)
    first, second = rng.normal(size=8), rng.normal(size=9)
    assert not unpaired(first, second, 0.05, chosen).excludes_zero
    apart = unpaired(first, second + 10, 0.05, chosen)
    assert apart.low > 7
    assert apart.high < 13


def test_how_many_are_needed() -> None:
    assert [pairs_needed(0.05 / others) for others in (1, 2, 3, 4)] == [6, 7, 7, 8]
    assert enough_unpaired(4, 4, 0.05)
    assert not enough_unpaired(3, 3, 0.05)
    for error in (0.05, 0.01, 0.2):
        needed = pairs_needed(error)
        assert 2 / 2**needed <= error < 2 / 2 ** (needed - 1)


@pytest.mark.parametrize(
    ("degrees", "share", "value"),
    [(1, 0.975, 12.7062), (2, 0.975, 4.30265), (5, 0.975, 2.57058), (5, 0.99, 3.36493), (19, 0.975, 2.09302)],
)
def test_student_s_quantiles(degrees: int, share: float, value: float) -> None:
    """Against the printed table."""
    assert t_quantile(share, degrees) == pytest.approx(value, rel=1e-5)


def test_percentiles_widen_for_few_blocks() -> None:
    draws = np.random.default_rng(0).normal(size=20_000)
    few, many = percentiles(draws, 0.05, 20), percentiles(draws, 0.05, 10_000)
    assert few.high == pytest.approx(1.96 * 1.0959, rel=0.03)  # t with 19 degrees, times sqrt(20 / 19), over z
    assert many.high == pytest.approx(1.96, rel=0.03)
    assert percentiles(np.full(10, np.nan), 0.05, 20) == Interval(-math.inf, math.inf)


@given(
    values=st.lists(st.integers(0, 50), min_size=1, max_size=60),
    blocks=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_ranks_of_weighted_blocks_are_those_of_the_drawn_values(values: list[int], blocks: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    index = rng.integers(0, blocks, len(values))
    order = BlockOrder(np.array(values), index, blocks)
    weights = np.vstack([np.ones((1, blocks), np.int64), block_counts(5, blocks, rng)])
    for row in weights:
        drawn = np.sort(np.repeat(values, row[index]))
        if len(drawn):
            ranks = np.array([[0, len(drawn) // 2, len(drawn) - 1]])
            assert order.at_ranks(row[None], ranks).tolist() == [drawn[ranks[0]].tolist()]


def test_many_resamples_at_once_are_each_by_itself() -> None:
    rng = np.random.default_rng(3)
    values, index = rng.integers(0, 10**9, 5000), rng.integers(0, 20, 5000)
    order = BlockOrder(values, index, 20)
    weights = block_counts(300, 20, rng)
    ranks = (weights @ order.sizes)[:, None] * [[1, 9]] // 10
    together = order.at_ranks(weights, ranks)
    for row in (0, 150, 299):
        drawn = np.sort(np.repeat(values, weights[row][index]))
        assert together[row].tolist() == drawn[ranks[row]].tolist()
