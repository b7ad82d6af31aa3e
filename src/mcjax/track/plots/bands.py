"""How sure a mean over repetitions is: bootstrap intervals, a point at a time."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

LEVEL = 95
RESAMPLES = 1000

Band = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]
"""The mean over repetitions, and the low and high end of its interval (NaN where there is none)."""


def band(values: NDArray[np.float64]) -> Band:
    """`values`: `[repetitions, N]`, NaN where a repetition says nothing.

    The interval is cut out of the means of repetitions drawn again with replacement, each of the `N` points by itself:
    an expanded percentile interval (Hesterberg, What Teachers Should Know About the Bootstrap, The American
    Statistician 69, 2015), which makes up for what resampling few values falls short of. It never leaves the range of
    the repetitions. A point with fewer than two of them has none.
    """
    there = np.isfinite(values)
    known = np.where(there, values, 0.0)
    counts = there.sum(axis=0)
    none: NDArray[np.float64] = np.full(values.shape[1:], np.nan)
    mean = np.divide(known.sum(axis=0), counts, out=none.copy(), where=counts > 0)
    if len(values) < 2:
        return mean, none, none
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(len(values), np.full(len(values), 1 / len(values)), RESAMPLES).astype(np.float64)
    weights = drawn @ there
    means = np.divide(drawn @ known, weights, out=np.full(weights.shape, np.nan), where=weights > 0)
    means = np.where(np.isnan(means), mean, means)  # a draw of repetitions that are all silent here
    tail = _tail(len(values))
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    return mean, np.where(counts > 1, low, np.nan), np.where(counts > 1, high, np.nan)


def _tail(count: int) -> float:
    """The share to cut off at either end: of the normal distribution, beyond Student's t of `count - 1` degrees."""
    normal, free = NormalDist(), count - 1
    z = normal.inv_cdf((1 + LEVEL / 100) / 2)
    # Student's t as a series in 1 / free (Abramowitz and Stegun 26.7.5).
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    return normal.cdf(-t * math.sqrt(count / free))


def scalar_band(values: list[float | None]) -> tuple[float, float, float]:
    """Mean, low and high of one figure over repetitions."""
    column = np.array([[np.nan if value is None else value] for value in values], np.float64)
    mean, low, high = band(column)
    return float(mean[0]), float(low[0]), float(high[0])
