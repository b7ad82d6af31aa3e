"""Gathers scattered pieces of a buffer into one contiguous stretch, and scatters them back.

A way to move bytes pays for each entry of its list (a header, a system call's vector, a work request); a gather in
memory pays much less for each. `docs/transfer-layouts.md` has both prices as measured, and what follows from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from mcjax.transfer.transports.endpoint import Spans

LONG_BYTES = 8 << 10
"""Pieces from here on are copied one by one, each at the speed of `memcpy`; shorter ones by one indexed copy for all
that are equally long. Measured: at 16 KiB the loop is 1.5 times as fast, at 1 KiB the indexed copy is twice as fast."""

PACK_BELOW_BYTES = 2 << 10
"""Mean length of pieces below which packing pays, over shared memory and over TCP alike (`benchmarks/packing.py`)."""

STAGED_BYTES = 1 << 20
"""Gathered in one go: it fits a core's second-level cache, so that what is scattered from it was never in memory."""

Offsets = NDArray[np.int64]
"""`[n]`, in bytes."""


def gather(buffer: NDArray[np.uint8], offsets: Offsets, nbytes: Offsets, packed: NDArray[np.uint8]) -> None:
    """Copy pieces of `buffer` one behind the other into `packed` (`[sum(nbytes)]`, or longer).

    Raises `ValueError` for a piece that is not inside `buffer`, before any byte is copied.
    """
    places = _places(buffer, offsets, nbytes, packed)
    for chosen, length in _alike(nbytes):
        if length >= LONG_BYTES:
            for piece, place in zip(offsets[chosen].tolist(), places[chosen].tolist(), strict=True):
                packed[place : place + length] = buffer[piece : piece + length]
        else:
            _windows(packed, length)[places[chosen]] = _windows(buffer, length)[offsets[chosen]]


def scatter(packed: NDArray[np.uint8], buffer: NDArray[np.uint8], offsets: Offsets, nbytes: Offsets) -> None:
    """The inverse of `gather`: what lies one behind the other in `packed` goes to its places in `buffer`."""
    places = _places(buffer, offsets, nbytes, packed)
    for chosen, length in _alike(nbytes):
        if length >= LONG_BYTES:
            for piece, place in zip(offsets[chosen].tolist(), places[chosen].tolist(), strict=True):
                buffer[piece : piece + length] = packed[place : place + length]
        else:
            _windows(buffer, length)[offsets[chosen]] = _windows(packed, length)[places[chosen]]


def pieces(nbytes: Offsets, most_bytes: int = STAGED_BYTES) -> Iterator[slice]:
    """Cut a list of pieces into stretches of at most `most_bytes` each; a longer piece is a stretch of its own."""
    ends = np.cumsum(nbytes)
    start = 0
    while start < len(nbytes):
        before = int(ends[start - 1]) if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + most_bytes, "right")))
        yield slice(start, end)
        start = end


def merged(*columns: Offsets, nbytes: Offsets) -> tuple[tuple[Offsets, ...], Offsets]:
    """Join pieces that follow their predecessor on every side: `columns` are offsets on each side, `nbytes` what a
    piece is long on all of them."""
    if not len(nbytes):
        return columns, nbytes
    follows = np.ones(len(nbytes) - 1, bool)
    for column in columns:
        follows &= column[1:] == column[:-1] + nbytes[:-1]
    firsts = np.flatnonzero(np.concatenate([[True], ~follows]))
    return tuple(column[firsts] for column in columns), np.add.reduceat(nbytes, firsts)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A batch of spans as one: the peer gathers its side into staging memory of its own (`gather`, at `offsets` and
    `nbytes`, which travel to it as plain numbers), one span is moved, and `finish` scatters it here."""

    offsets: Offsets
    """Of the pieces in the peer's region, in bytes."""
    nbytes: Offsets
    places: Offsets
    """Where they go in the region here."""

    @classmethod
    def of(cls, spans: Spans) -> Packed:
        return cls(spans.remote, spans.nbytes, spans.local)

    @property
    def total_bytes(self) -> int:
        """Of staging memory, on either side."""
        return int(self.nbytes.sum())

    def span(self, local: int = 0, remote: int = 0) -> Spans:
        """The one span, from and to these offsets of the staging regions."""
        return Spans.of([(local, remote, self.total_bytes)])

    def finish(self, staging: NDArray[np.uint8], buffer: NDArray[np.uint8]) -> None:
        """What has arrived goes to its places. Raises `ValueError` for one outside `buffer`."""
        scatter(staging, buffer, self.places, self.nbytes)


def fragmented(nbytes: Offsets, below_bytes: int = PACK_BELOW_BYTES) -> bool:
    """Whether a batch of so long pieces is moved sooner when it is packed first: its pieces are many, and shorter than
    `below_bytes` in the mean."""
    return len(nbytes) > 1 and int(nbytes.sum()) < below_bytes * len(nbytes)


def _alike(nbytes: Offsets) -> Iterator[tuple[NDArray[np.int64] | slice, int]]:
    """Pieces of one length each, by index."""
    lengths = np.unique(nbytes)
    for length in lengths.tolist():
        yield (slice(None) if len(lengths) == 1 else np.flatnonzero(nbytes == length)), length


def _windows(buffer: NDArray[np.uint8], length: int) -> NDArray[np.uint8]:
    """`[len - length + 1, length]`: every stretch of so many bytes, as a view. An index of it copies like `memcpy`."""
    return as_strided(buffer, (len(buffer) - length + 1, length), (1, 1))


def _places(buffer: NDArray[np.uint8], offsets: Offsets, nbytes: Offsets, packed: NDArray[np.uint8]) -> Offsets:
    if len(offsets) != len(nbytes):
        raise ValueError(f"{len(offsets)} offsets, {len(nbytes)} lengths")
    bad = np.flatnonzero((nbytes < 1) | (offsets < 0) | (offsets > len(buffer) - nbytes))
    if len(bad):
        first = int(bad[0])
        raise ValueError(f"piece {first}: bytes {offsets[first]} + {nbytes[first]} of a buffer of {len(buffer)}")
    ends = np.cumsum(nbytes)
    if len(ends) and ends[-1] > len(packed):
        raise ValueError(f"{ends[-1]} bytes of pieces, {len(packed)} of room")
    return ends - nbytes
