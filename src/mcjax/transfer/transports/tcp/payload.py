"""Payload between a wire and a region: group by group, straight from and into the region's memory.

Before every group the region is entered: so `advance` and `withdraw` take effect within one group. What becomes of
the rest then: an answer's is sent as zeros, with statuses behind it that say so, and what is received is thrown away,
so that the stream stays in step. A write's has nothing behind it that could take it back, and is not sent (`Withheld`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from mcjax.transfer.transports.tcp.frames import Status
from mcjax.transfer.transports.tcp.regions import Region, User
from mcjax.transfer.transports.tcp.wire import Wire

GROUP_BYTES = 8 << 20
"""Moved in one call. Between 4 and 16 MiB, the CPU time of a byte still falls by some percent; what waits for a region
waits for so much."""
GROUP_VIEWS = 512
"""The kernel takes 1,024 pieces a call."""
PIECE_BYTES = 256 << 10
"""The same where each piece is summed while it is in the cache."""


@dataclass(slots=True, eq=False)
class Spans:
    """Some spans of one region, as of an epoch of it, for `user` to read or write. `offsets`, `nbytes`: `[n]`; they
    are inside the region, and have `total` bytes. Nobody sets a field."""

    region: Region
    epoch: int
    user: User
    offsets: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    total: int

    def only(self, chosen: NDArray[np.bool_] | slice) -> Spans:
        """Some of them."""
        nbytes = self.nbytes[chosen]
        return Spans(self.region, self.epoch, self.user, self.offsets[chosen], nbytes, int(nbytes.sum()))

    def enter(self, writing: bool) -> bool:
        return self.region.enter(self.user, self.epoch, writing) is Status.OK

    def leave(self) -> None:
        self.region.leave(self.user)


@dataclass(slots=True)
class Group:
    """Views that are moved in one call; `spans`: the index of each one's span, where somebody wants to know."""

    views: list[memoryview]
    spans: Sequence[int]
    nbytes: int


class Withheld(Exception):
    """The region may not be read any more, and nothing may be sent in its place."""


class Sums:
    """XXH3-128 of spans whose bytes come by in order, maybe in pieces."""

    def __init__(self, nbytes: NDArray[np.int64]):
        self.digests = [b""] * len(nbytes)
        self._nbytes: list[int] = nbytes.tolist()
        self._partial = xxhash.xxh3_128()
        self._done = 0

    def add(self, group: Group) -> None:
        for span, view in zip(group.spans, group.views, strict=True):
            if len(view) == self._nbytes[span]:
                self.digests[span] = xxhash.xxh3_128_digest(view)
                continue
            self._partial.update(view)
            self._done += len(view)
            if self._done == self._nbytes[span]:
                self.digests[span] = self._partial.digest()
                self._partial.reset()
                self._done = 0

    def add_whole(self, joined: memoryview) -> None:
        """All spans at once, one behind the other."""
        start = 0
        for span, nbytes in enumerate(self._nbytes):
            self.digests[span] = xxhash.xxh3_128_digest(joined[start : start + nbytes])
            start += nbytes


def answer(wire: Wire, spans: Spans, head: memoryview) -> None:
    """`head`, and the bytes of the spans behind it, or zeros; something follows at once."""
    left = spans.total - _send(wire, spans, head, None, more=True)
    zeros = memoryview(bytes(min(left, PIECE_BYTES)))
    while left:
        piece = zeros[: min(left, PIECE_BYTES)]
        left -= len(piece)
        wire.send([piece], more=True)


def request(wire: Wire, spans: Spans, head: memoryview, sums: Sums | None) -> None:
    """`head`, and the bytes of the spans behind it. Raises `Withheld` in the middle of it."""
    if _send(wire, spans, head, sums, more=False) < spans.total:
        raise Withheld


def _send(wire: Wire, spans: Spans, head: memoryview, sums: Sums | None, more: bool) -> int:
    """How many bytes of the spans were sent."""
    sent = 0
    lead = [head]
    for group in groups(spans, sums is not None):
        if not spans.enter(writing=False):
            break
        try:
            if sums is not None:
                sums.add(group)
            sent += group.nbytes
            wire.send(lead + group.views, more or sent < spans.total)
        finally:
            spans.leave()
        lead = []
    if lead:
        wire.send(lead, more)
    return sent


def gather(spans: Spans) -> bytes | None:
    """A copy of all their bytes, for payloads so small that this costs less than another call; None if they may not be
    read any more."""
    if not spans.enter(writing=False):
        return None
    try:
        if len(spans.offsets) == 1:
            start = int(spans.offsets[0])
            return bytes(spans.region.view[start : start + spans.total])
        return b"".join(view for group in groups(spans, False) for view in group.views)
    finally:
        spans.leave()


def receive(wire: Wire, spans: Spans, tail: memoryview | None = None, sums: Sums | None = None) -> None:
    """The bytes of the spans, and `tail`, which follows them."""
    left = spans.total
    last = [] if tail is None else [tail]
    for group in groups(spans, sums is not None):
        if not spans.enter(writing=True):
            break
        try:
            left -= group.nbytes
            wire.receive(group.views if left else group.views + last)
            if sums is not None:
                sums.add(group)
        finally:
            spans.leave()
    if left:
        drain(wire, left)
    if left or not spans.total:
        wire.receive(last)


def drain(wire: Wire, nbytes: int) -> None:
    """Receive bytes that nobody may have."""
    scratch = memoryview(bytearray(min(nbytes, PIECE_BYTES)))
    while nbytes:
        piece = scratch[: min(nbytes, PIECE_BYTES)]
        wire.receive([piece])
        nbytes -= len(piece)


def groups(spans: Spans, by_span: bool) -> Iterator[Group]:
    """The bytes of the spans, in order. `by_span`: in smaller groups whose views belong to one span each; else
    neighbours are one view."""
    view = spans.region.view
    most_bytes = PIECE_BYTES if by_span else GROUP_BYTES
    if len(spans.offsets) == 1 and spans.total <= most_bytes:
        start = int(spans.offsets[0])
        yield Group([view[start : start + spans.total]], [0], spans.total)
        return
    starts, lengths = (spans.offsets, spans.nbytes) if by_span else runs(spans.offsets, spans.nbytes)
    if len(lengths) and int(lengths.max()) > most_bytes:
        yield from _with_long_ones(view, starts, lengths, most_bytes)
        return
    ends = np.cumsum(lengths)
    pairs = list(zip(starts.tolist(), (starts + lengths).tolist(), strict=True))
    first, done = 0, 0
    while first < len(pairs):
        fit = int(np.searchsorted(ends, done + most_bytes, side="right"))
        stop = min(fit, first + GROUP_VIEWS)
        end = int(ends[stop - 1])
        yield Group([view[start:end] for start, end in pairs[first:stop]], range(first, stop), end - done)
        first, done = stop, end


def _with_long_ones(
    view: memoryview, starts: NDArray[np.int64], lengths: NDArray[np.int64], most_bytes: int
) -> Iterator[Group]:
    """The same where some have to be cut."""
    views: list[memoryview] = []
    owners: list[int] = []
    size = 0
    for index, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        while length:
            taken = min(length, most_bytes - size)
            views.append(view[start : start + taken])
            owners.append(index)
            size += taken
            start, length = start + taken, length - taken
            if size == most_bytes or len(views) == GROUP_VIEWS:
                yield Group(views, owners, size)
                views, owners, size = [], [], 0
    if views:
        yield Group(views, owners, size)


def runs(offsets: NDArray[np.int64], nbytes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Spans that follow one another in memory, as one: offsets and lengths, `[k]` each."""
    if len(offsets) < 2:
        return offsets, nbytes
    firsts = np.flatnonzero(np.append(True, offsets[1:] != offsets[:-1] + nbytes[:-1]))
    return offsets[firsts], np.add.reduceat(nbytes, firsts)
