"""Exact statistics of integer nanoseconds: the same figures on every machine and every version.

Sums are integers; a percentile interpolates linearly between the two closest ranks of the sorted values (NumPy's
default rule) in integer arithmetic and is divided once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from mcjax.types import NS_PER_S

PERCENTILES = (50, 90, 99)
DIGIT_BITS = 16
SHORT = 1 << 17
"""Values looked at together: what is computed from them then stays in a processor's cache."""
TAIL_SHARE = 10
"""The tail of a request is the longest 1 in `TAIL_SHARE` of its token intervals, rounded up."""


def ratio(dividend: int, divisor: int) -> int:
    """`dividend / divisor` rounded to the nearest integer, halves up. Both non-negative."""
    return (2 * dividend + divisor) // (2 * divisor)


def percentile_parts(ordered: NDArray[np.int64], percent: int) -> int:
    """100 times the percentile (an exact integer) of values that are in order at least at the two ranks it needs."""
    rank = percent * (len(ordered) - 1)
    below, share = divmod(rank, 100)
    above = min(below + 1, len(ordered) - 1)
    return int(ordered[below]) * (100 - share) + int(ordered[above]) * share


def tail_mean_ns(ordered: NDArray[np.int64]) -> int:
    """Mean of the longest tenth (at least one) of sorted intervals, to the nearest nanosecond."""
    count = -(-len(ordered) // TAIL_SHARE)
    return ratio(int(ordered[-count:].sum()), count)


def spread_s(values_ns: NDArray[np.int64]) -> dict[str, float | None]:
    """`mean`, `p50`, `p90`, `p99` in seconds; all None when there are no values. `values_ns`: `[N]`, any order."""
    return spread_of_pieces_s(lambda: [values_ns])


def spread_of_pieces_s(pieces: Callable[[], Iterable[NDArray[np.int64]]]) -> dict[str, float | None]:
    """`spread_s` of non-negative values too many to hold: `pieces()` goes through them, and is called a few times."""
    count = total = largest = 0
    for values in _short(pieces()):
        count += len(values)
        # In halves: a sum of int64 would overflow at years of nanoseconds.
        total += (int((values >> 32).sum()) << 32) + int((values & 0xFFFFFFFF).sum())
        largest = max(largest, int(values.max(initial=0)))
    names = ["mean", *(f"p{percent}" for percent in PERCENTILES)]
    if count == 0:
        return dict.fromkeys(names)
    ends = [(percent, *divmod(percent * (count - 1), 100)) for percent in PERCENTILES]
    ranks = sorted({min(below + step, count - 1) for _, below, _ in ends for step in (0, 1)})
    found = at_ranks(pieces, largest, ranks)
    parts = [found[below] * (100 - share) + found[min(below + 1, count - 1)] * share for _, below, share in ends]
    return dict(zip(names, [total / (count * NS_PER_S), *(part / (100 * NS_PER_S) for part in parts)], strict=True))


def at_ranks(pieces: Callable[[], Iterable[NDArray[np.int64]]], largest: int, ranks: Sequence[int]) -> dict[int, int]:
    """The values at some ranks (0: the smallest) of non-negative integers up to `largest`, without sorting them.

    Each round counts values by their next `DIGIT_BITS` bits, among those that agree with a rank's value so far.
    """
    prefix = dict.fromkeys(ranks, 0)
    inside = {rank: rank for rank in ranks}  # its rank among the values with this prefix
    left = max(largest.bit_length(), 1)
    while left:
        bits = min(DIGIT_BITS, left)
        left -= bits
        counts = {high: np.zeros(1 << bits, np.int64) for high in prefix.values()}
        for values in _short(pieces()):
            digits = values >> left
            for high, count in counts.items():
                some = digits[digits >> bits == high]
                count += np.bincount(some & ((1 << bits) - 1), minlength=1 << bits)
        for rank, high in prefix.items():
            up_to = np.cumsum(counts[high])
            digit = int(np.searchsorted(up_to, inside[rank], side="right"))
            inside[rank] -= int(up_to[digit - 1]) if digit else 0
            prefix[rank] = high << bits | digit
    return prefix


def _short(pieces: Iterable[NDArray[np.int64]]) -> Iterator[NDArray[np.int64]]:
    for values in pieces:
        for first in range(0, len(values), SHORT):
            yield values[first : first + SHORT]


def merge(starts_ns: NDArray[np.int64], ends_ns: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The union of intervals as disjoint ones in order: `(starts, ends)`. Empty intervals vanish."""
    real = ends_ns > starts_ns
    starts_ns, ends_ns = starts_ns[real], ends_ns[real]
    if len(starts_ns) == 0:
        return starts_ns, ends_ns
    order = np.argsort(starts_ns, kind="stable")
    starts_ns = starts_ns[order]
    reach = np.maximum.accumulate(ends_ns[order])
    first = np.concatenate(([True], starts_ns[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return starts_ns[first], reach[last]


def overlap_ns(
    starts_ns: NDArray[np.int64], ends_ns: NDArray[np.int64], union: tuple[NDArray[np.int64], NDArray[np.int64]]
) -> NDArray[np.int64]:
    """`[N]`: how much of each interval lies inside a union made by `merge`."""
    union_starts, union_ends = union
    if len(union_starts) == 0:
        return np.zeros(len(starts_ns), dtype=np.int64)
    before = np.concatenate(([0], np.cumsum(union_ends - union_starts)))

    def covered(times_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        index = np.searchsorted(union_starts, times_ns, side="right")
        inside = np.maximum(union_ends[np.maximum(index - 1, 0)] - times_ns, 0)
        return np.where(index > 0, before[index] - inside, 0)

    return covered(ends_ns) - covered(starts_ns)
