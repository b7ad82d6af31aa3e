"""Bootstrap intervals of a difference, and how much data it takes before one may be believed.

Over pairs of runs the bootstrap is studentised (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section
12.5): each resampled mean is divided by its own standard error. With few and skewed pairs that covers the truth more
often than percentiles do (Hesterberg, What Teachers Should Know About the Bootstrap, 2015, section 5, and the table in
`docs/compare.md`). Where no standard error is at hand (a percentile of one run's requests), the interval is one of
percentiles, widened for small samples as Hesterberg describes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

RESAMPLES = 10_000
ERROR = 0.05
"""How often an interval may miss the truth: those of 95 % are shown."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An end that the data do not bound is infinite."""

    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0

    def joined(self, other: Interval) -> Interval:
        """What lies in either, and between."""
        return Interval(min(self.low, other.low), max(self.high, other.high))


UNBOUNDED = Interval(-math.inf, math.inf)


def paired(differences: Floats, error: float, chosen: Counts) -> Interval:
    """Of the mean of paired differences, `[n]`; `chosen`, `[R, n]`, are the indices of the resamples."""
    estimate, count = float(differences.mean()), len(differences)
    own_error = float(differences.std(ddof=1)) / math.sqrt(count)
    if own_error == 0:
        return _constant(estimate, count >= pairs_needed(error))
    drawn = differences[chosen]
    errors = drawn.std(axis=1, ddof=1) / math.sqrt(count)
    return _studentised(estimate, own_error, drawn.mean(axis=1), errors, error)


def unpaired(first: Floats, second: Floats, error: float, chosen: tuple[Counts, Counts]) -> Interval:
    """Of `mean(second) - mean(first)` of independent samples, each resampled by itself."""
    samples = (first, second)
    estimate = float(second.mean() - first.mean())
    own_error = math.sqrt(sum(sample.var(ddof=1) / len(sample) for sample in samples))
    if own_error == 0:
        return _constant(estimate, enough_unpaired(len(first), len(second), error))
    drawn = [sample[index] for sample, index in zip(samples, chosen, strict=True)]
    variances = [values.var(axis=1, ddof=1) / values.shape[1] for values in drawn]
    means = drawn[1].mean(axis=1) - drawn[0].mean(axis=1)
    return _studentised(estimate, own_error, means, np.sqrt(variances[0] + variances[1]), error)


def _constant(estimate: float, enough: bool) -> Interval:
    """Of values that are all the same: a few may be so by chance."""
    return Interval(estimate, estimate) if enough or estimate == 0 else UNBOUNDED


def _studentised(estimate: float, own_error: float, means: Floats, errors: Floats, error: float) -> Interval:
    # A resample of one value over and over has no spread: its distance counts as infinite, which tells on the interval.
    away = means - estimate
    spread = errors > 1e-9 * own_error
    ratios = np.where(np.abs(away) <= 1e-9 * own_error, 0.0, np.copysign(np.inf, away))
    ratios[spread] = away[spread] / errors[spread]
    low, high = _ends(ratios, error / 2)
    return Interval(estimate - high * own_error, estimate - low * own_error)


def percentiles(draws: Floats, error: float, sample: int) -> Interval:
    """Of a statistic of `sample` blocks, from its value in each resample, `[R]`; those that have none are NaN."""
    known = draws[~np.isnan(draws)]
    if len(known) == 0:
        return UNBOUNDED
    widened = math.sqrt(sample / (sample - 1)) * t_quantile(1 - error / 2, sample - 1)
    return Interval(*_ends(known, NormalDist().cdf(-widened)))


def _ends(draws: Floats, share: float) -> tuple[float, float]:
    """The values that leave `share` of the draws below, and above: the ranks next outside, so never too narrow."""
    ordered = np.sort(draws)
    rank = max(math.floor(share * (len(ordered) + 1)), 1)
    return float(ordered[rank - 1]), float(ordered[-rank])


def resamples(count: int, size: int, rng: np.random.Generator) -> Counts:
    """`[count, size]` indices below `size`."""
    return rng.integers(0, size, (count, size))


def block_counts(count: int, blocks: int, rng: np.random.Generator) -> Counts:
    """`[count, blocks]`: how often each block is drawn in each resample of as many blocks as there are."""
    return rng.multinomial(blocks, np.full(blocks, 1 / blocks), count)


def pairs_needed(error: float) -> int:
    """The fewest pairs that can speak at this level: if all have one sign, that happens by chance in 2 of 2**n."""
    return max(2, math.ceil(math.log2(2 / error) - 1e-9))


def enough_unpaired(first: int, second: int, error: float) -> bool:
    """Whether the most extreme order of two independent samples is rare enough (the exact rank test)."""
    return 2 / math.comb(first + second, first) <= error + 1e-12


def t_quantile(share: float, degrees: int) -> float:
    """Of Student's t with a whole number of degrees of freedom; `share` above one half."""
    low, high = 0.0, 1.0
    while _t_within(high, degrees) < 2 * share - 1:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_within(middle, degrees) < 2 * share - 1 else (low, middle)
    return (low + high) / 2


def _t_within(t: float, degrees: int) -> float:
    """The probability of -t .. t (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    term = total = 1.0 if degrees % 2 == 0 else cosine
    for step in range(2 + degrees % 2, degrees - 1, 2):
        term *= cosine * cosine * (step - 1) / step
        total += term
    if degrees % 2 == 0:
        return sine * total
    return 2 / math.pi * (angle + (sine * total if degrees > 1 else 0.0))
