"""Many values as a curve of few points, without holding the values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.track.arrow import compute
from mcjax.track.run import Run
from mcjax.types import NS_PER_S

CURVE_POINTS, CURVE_BITS = 500, 10

_DROPPED, _ONE = 52 - CURVE_BITS, 1023 << CURVE_BITS  # the bin of 1 ns, and of nothing at all

Curve = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Values in nanoseconds, and the share of all that are at most so large."""


def window_ns(run: Run) -> int:
    """When the window of the summary begins: requests that came before it are in no figure."""
    return round((run.summary["duration_s"] - run.summary["window_s"]) * NS_PER_S)


def latencies(run: Run, column: str) -> Iterator[NDArray[np.int64]]:
    """`ttft_ns`, or all `intervals_ns`, of the requests that the summary counts, a piece at a time."""
    begin_ns = window_ns(run)
    for piece in run.pieces("requests", "arrival_ns", column):
        cells = piece.filter(compute().greater_equal(piece.column(0), begin_ns)).column(1)
        yield (compute().list_flatten(cells) if column == "intervals_ns" else cells.drop_null()).to_numpy()


def counted(pieces: Iterable[NDArray[np.int64]]) -> NDArray[np.int64]:
    """`[64 << CURVE_BITS]`: how many values (nanoseconds) fall into each bin, a thousandth of the value wide.

    A bin is the leading bits of a double: exponent and `CURVE_BITS` of the mantissa.
    """
    counts = np.zeros(64 << CURVE_BITS, np.int64)
    for values in pieces:
        leading = np.maximum(values, 1).astype(np.float64).view(np.int64) >> _DROPPED
        counts += np.bincount(leading - _ONE, minlength=len(counts))
    return counts


def values_of(bins: NDArray[np.int64]) -> NDArray[np.float64]:
    """The lower ends of bins, in nanoseconds."""
    return np.where(bins > 0, (bins + _ONE << _DROPPED).view(np.float64), 0.0)


def told_apart(counts: NDArray[Any]) -> NDArray[np.int64]:
    """No more bins than can be told apart in a curve of `counts`, the first and the last that hold any among them."""
    bins = np.flatnonzero(counts)
    if len(bins) == 0:
        return bins
    up_to = np.cumsum(counts[bins])
    last = float(up_to[-1])
    kept = np.searchsorted(up_to, np.linspace(min(1.0, float(up_to[0])), last, CURVE_POINTS))
    return bins[np.unique(np.minimum(kept, len(bins) - 1))]


def shares(counts: NDArray[np.int64], bins: NDArray[np.int64]) -> NDArray[np.float64]:
    """The share of all counted values in each of these bins or a lower one."""
    up_to = np.cumsum(counts)
    return up_to[bins] / max(int(up_to[-1]), 1)


def curve(pieces: Iterable[NDArray[np.int64]]) -> Curve:
    """The share of all values that is at most so large, within a thousandth of the value."""
    counts = counted(pieces)
    bins = told_apart(counts)
    return values_of(bins), shares(counts, bins)
