"""Which few shapes to compile: the sizes that waste the least padding on a sample of what will be asked for. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np

from mcjax.errors import ConfigError


def smallest(buckets: Sequence[int], size: int) -> int:
    """The smallest bucket that holds `size`. `buckets` ascend."""
    return buckets[bisect_left(buckets, size)]


def ladder(key: str, buckets: Sequence[int], largest: int) -> tuple[int, ...]:
    """The buckets in order, `largest` the last of them. Raises `ConfigError` for one that could not be used."""
    for bucket in buckets:
        if isinstance(bucket, bool) or not isinstance(bucket, int) or not 1 <= bucket <= largest:
            raise ConfigError(key, list(buckets), f"must be whole numbers from 1 to {largest}")
    return tuple(sorted({*buckets, largest}))


def tune(sizes: Iterable[int], largest: int, count: int, multiple: int = 1) -> tuple[int, ...]:
    """At most `count` buckets, `largest` among them, that make the least padding of `sizes` (each 1 to `largest`).

    All but `largest` are multiples of `multiple`. Exact, by dynamic programming over the sizes there are: the best way
    to serve the smallest of them with b buckets is the best with b - 1 for some of those, and one bucket for the rest.
    No more buckets than lessen the padding.
    """
    asked = np.array(sorted(sizes), dtype=np.int64)
    rounded = np.minimum(-(-asked // multiple) * multiple, largest)
    ends = np.unique(np.append(rounded, largest))  # [n] candidates
    rows = np.append(0, np.searchsorted(rounded, ends, side="right"))  # [n + 1] how many sizes the first i ends hold
    best = ends * rows[1:]  # [n] tokens computed for what the first i + 1 ends hold, with one bucket: the last of them
    waste, previous = best, [np.full(len(ends), -1)]
    for _ in range(1, count):
        fewer, chosen = best, np.full(len(ends), -1)
        best = fewer.copy()
        for last in range(1, len(ends)):
            computed = fewer[:last] + ends[last] * (rows[last + 1] - rows[1 : last + 1])
            found = int(computed.argmin())
            if computed[found] < fewer[last]:
                best[last], chosen[last] = computed[found], found
        if best[-1] == waste[-1]:
            break
        waste = best
        previous.append(chosen)
    # Back from the last end. Where fewer buckets were as good, -1 says to look among those.
    buckets, end, level = [int(ends[-1])], len(ends) - 1, len(previous) - 1
    while level > 0:
        if previous[level][end] >= 0:
            end = int(previous[level][end])
            buckets.append(int(ends[end]))
        level -= 1
    return tuple(sorted(buckets))


def padding(sizes: Iterable[int], buckets: Sequence[int]) -> float:
    """The share of what is computed that is padding, when each size takes the smallest bucket; 0 for no sizes."""
    asked = computed = 0
    for size in sizes:
        asked += size
        computed += smallest(buckets, size)
    return 1 - asked / computed if computed else 0.0


def chunks(lengths: Iterable[int], chunk: int) -> list[int]:
    """The chunks that prompts of these lengths are computed in, when nothing of them is cached."""
    found: list[int] = []
    for length in lengths:
        found += [chunk] * (length // chunk)
        if length % chunk:
            found.append(length % chunk)
    return found


def doublings(largest: int) -> tuple[int, ...]:
    """1, 2, 4 .. and `largest`."""
    return tuple(sorted({*(1 << power for power in range(largest.bit_length())), largest}))
