"""A batch of spans performed by the process that its bytes arrive in: cut into pieces, watched, copied, summed.

Before every chunk of pieces: has the batch been given up, is it late, do both sides still stand? After it: do they
still? So giving up, a deadline, `advance` and `withdraw` take effect within one chunk, and what changed hands during
the copy is never called good.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from mcjax.errors import AccessRefused, StaleRegion, TransferCancelled, TransferError, TransferTimeout
from mcjax.transfer.transports.copying import PIECE_BYTES, digest_of
from mcjax.transfer.transports.endpoint import Pending, SpanResults, Spans
from mcjax.transfer.transports.regions import Region

OUTSIDE = "the span is not inside both regions"

CHUNK_BYTES = 4 << 20
"""Copied between two looks at the world: under a millisecond, and much more than the look costs."""


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Spans, cut where they are long. `span`: the index of the one that a piece belongs to. All `[n]` int64."""

    span: NDArray[np.int64]
    target: NDArray[np.int64]
    source: NDArray[np.int64]
    nbytes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.nbytes)

    def part(self, start: int, stop: int) -> Pieces:
        return Pieces(self.span[start:stop], self.target[start:stop], self.source[start:stop], self.nbytes[start:stop])


class Place(Protocol):
    """One side of a batch: bytes that are touched between `enter` and `leave` only."""

    nbytes: int
    guarded: bool
    """Whether `allows` has to be asked of each span."""

    def enter(self) -> TransferError | None:
        """Why it must not be touched, or None; then `leave` follows."""
        ...

    def leave(self) -> TransferError | None:
        """Why what was touched since `enter` must not be believed, or None."""
        ...

    def allows(self, offset: int, nbytes: int) -> bool: ...


class Source(Place, Protocol):
    """Where bytes come from."""

    def fetch(self, into: NDArray[np.uint8], pieces: Pieces) -> None:
        """Copy the pieces into the target's buffer. Raises `TransferError` if they could not be."""
        ...

    def fetch_one(self, into: NDArray[np.uint8], target: int, source: int, nbytes: int) -> None:
        """The same of one piece, for less: what is small is soon copied."""
        ...


class Use:
    """A region of this process as one side of a batch, in the epoch that the batch was told of."""

    def __init__(self, region: Region, epoch: int, *, writing: bool, guarded: bool):
        self.region = region
        self.nbytes = region.nbytes
        self.guarded = guarded and region.guard is not None
        self._epoch = epoch
        self._writing = writing

    def enter(self) -> TransferError | None:
        return self.region.enter(self._epoch, self._writing)

    def leave(self) -> TransferError | None:
        self.region.leave(self._writing)
        return self.region.problem(self._epoch)

    def allows(self, offset: int, nbytes: int) -> bool:
        guard = self.region.guard
        return guard is None or guard(offset, nbytes, self._epoch)

    def fetch(self, into: NDArray[np.uint8], pieces: Pieces) -> None:
        copy_pieces(self.region.buffer, into, pieces)

    def fetch_one(self, into: NDArray[np.uint8], target: int, source: int, nbytes: int) -> None:
        into[target : target + nbytes] = self.region.buffer[source : source + nbytes]


def copy_pieces(read: NDArray[np.uint8], into: NDArray[np.uint8], pieces: Pieces) -> None:
    """Inside one address space. NumPy lets other threads run meanwhile, and copes with source and target that
    overlap."""
    for target, source, nbytes in zip(
        pieces.target.tolist(), pieces.source.tolist(), pieces.nbytes.tolist(), strict=True
    ):
        into[target : target + nbytes] = read[source : source + nbytes]


@dataclass(slots=True, eq=False)
class Job:
    """What is to be copied, until when, and how it went so far."""

    spans: Spans
    """`local`: offsets in the target, `remote`: in the source, whoever asked."""
    deadline: float
    """By `time.monotonic()`."""
    checksums: bool
    given_up: Callable[[], bool]
    errors: dict[int, TransferError] = field(default_factory=dict[int, TransferError])
    digests: list[bytes] = field(default_factory=list[bytes])

    def stopped(self) -> TransferError | None:
        if self.given_up():
            return TransferCancelled("given up by whoever asked for it")
        if time.monotonic() >= self.deadline:
            return TransferTimeout("not there by its deadline")
        return None

    def perform(self, target: Use, source: Source) -> SpanResults:
        """Copy all that can be, on this thread. Never raises."""
        if len(self.spans) == 1 and not self.errors and not target.guarded and not source.guarded:
            at, start, nbytes = self.spans.local.item(), self.spans.remote.item(), self.spans.nbytes.item()
            if nbytes <= (PIECE_BYTES if self.checksums else CHUNK_BYTES):
                return self._perform_one(target, source, at, start, nbytes)
        self.digests = [b""] * len(self.spans) if self.checksums else []
        for index in self.spans.outside(target.nbytes, source.nbytes).tolist():
            self.errors[index] = AccessRefused(OUTSIDE)
        pieces = cut(self.spans, self.errors, PIECE_BYTES if self.checksums else CHUNK_BYTES)
        try:
            if target.guarded or source.guarded:
                self._by_span(pieces, target, source)
            else:
                self._copy(pieces, target, source)
        except Exception as problem:  # a guard's, say
            self._fail(pieces, 0, TransferError(f"{type(problem).__name__}: {problem}"))
        for index in self.errors:
            if self.digests:
                self.digests[index] = b""
        return SpanResults(dict(sorted(self.errors.items())), tuple(self.digests))

    def _perform_one(self, target: Use, source: Source, at: int, start: int, nbytes: int) -> SpanResults:
        inside = nbytes > 0 and 0 <= at <= target.nbytes - nbytes and 0 <= start <= source.nbytes - nbytes
        digest = b""

        def copy(into: NDArray[np.uint8]) -> None:
            nonlocal digest
            source.fetch_one(into, at, start, nbytes)
            if self.checksums:
                digest = digest_of(into[at : at + nbytes])

        problem = self.stopped() if inside else AccessRefused(OUTSIDE)
        problem = problem or self._between_looks(target, source, copy)
        if problem is not None:
            return SpanResults({0: problem}, (b"",) if self.checksums else ())
        return SpanResults({}, (digest,) if self.checksums else ())

    def _by_span(self, pieces: Pieces, target: Use, source: Source) -> None:
        bounds = np.flatnonzero(np.diff(pieces.span, prepend=-1, append=-1)).tolist()
        for start, stop in itertools.pairwise(bounds):
            index = int(pieces.span[start])
            target_span = int(self.spans.local[index]), int(self.spans.nbytes[index])
            source_span = int(self.spans.remote[index]), int(self.spans.nbytes[index])
            for when in ("before", "during"):
                if not (target.allows(*target_span) and source.allows(*source_span)):
                    self.errors[index] = StaleRegion(f"the bytes changed hands {when} the copy")
                    break
                if when == "before":
                    self._copy(pieces.part(start, stop), target, source)
                    if index in self.errors:
                        break

    def _copy(self, pieces: Pieces, target: Use, source: Source) -> None:
        digest = xxhash.xxh3_128()
        for start, stop in chunks(pieces.nbytes, CHUNK_BYTES):
            part = pieces.part(start, stop)
            problem = self.stopped() or self._between_looks(target, source, partial(self._fetch, source, part, digest))
            if problem is not None:
                self._fail(pieces, start, problem)
                return

    def _fetch(self, source: Source, part: Pieces, digest: xxhash.xxh3_128, into: NDArray[np.uint8]) -> None:
        if not self.checksums:
            source.fetch(into, part)
            return
        for start, stop in chunks(part.nbytes, PIECE_BYTES):
            few = part.part(start, stop)
            source.fetch(into, few)
            self._sum(few, into, digest)

    def _between_looks(
        self, target: Use, source: Source, copy: Callable[[NDArray[np.uint8]], object]
    ) -> TransferError | None:
        """Have a chunk copied into the target's buffer; why it must not be believed, or None."""
        problem = target.enter()
        if problem is not None:
            return problem
        problem = source.enter()
        if problem is not None:
            target.leave()
            return problem
        gone: list[TransferError | None] = []
        try:
            copy(target.region.buffer)
        except TransferError as error:
            problem = error.with_traceback(None)  # or the frames there would keep what the peer has, until collected
        except Exception as error:  # whatever went wrong must reach whoever waits, as a typed error
            problem = TransferError(f"{type(error).__name__}: {error}")
        finally:
            gone += source.leave(), target.leave()
        # Whose memory is gone says more than that it could not be read.
        return gone[0] or gone[1] or problem

    def _sum(self, part: Pieces, buffer: NDArray[np.uint8], digest: xxhash.xxh3_128) -> None:
        """Of what arrived, while it is in the cache."""
        for index, at, nbytes in zip(part.span.tolist(), part.target.tolist(), part.nbytes.tolist(), strict=True):
            block = buffer[at : at + nbytes]
            if nbytes == self.spans.nbytes[index]:
                self.digests[index] = digest_of(block)
                continue
            if at == self.spans.local[index]:
                digest.reset()
            digest.update(block)  # pyright: ignore[reportArgumentType]
            if at + nbytes == self.spans.local[index] + self.spans.nbytes[index]:
                self.digests[index] = digest.digest()

    def _fail(self, pieces: Pieces, start: int, problem: TransferError) -> None:
        """The spans of these pieces, from number `start` on, have not arrived."""
        for index in np.unique(pieces.span[start:]).tolist():
            self.errors.setdefault(index, problem)


def cut(spans: Spans, without: dict[int, TransferError], most_bytes: int) -> Pieces:
    """Pieces of at most `most_bytes`, in the spans' order; `without` those that failed already."""
    index = np.arange(len(spans))
    if without:
        index = np.setdiff1d(index, np.fromiter(without, np.int64))
    target, source, nbytes = spans.local[index], spans.remote[index], spans.nbytes[index]
    counts: NDArray[np.int64] = -(-nbytes // most_bytes)
    if not len(counts) or counts.max() == 1:
        return Pieces(index, target, source, nbytes)
    first: NDArray[np.int64] = np.cumsum(counts) - counts
    of = np.repeat(np.arange(len(counts)), counts)
    skipped: NDArray[np.int64] = (np.arange(len(of)) - first[of]) * most_bytes
    rest = np.minimum(nbytes[of] - skipped, most_bytes)
    return Pieces(index[of], target[of] + skipped, source[of] + skipped, rest)


def chunks(nbytes: NDArray[np.int64], most_bytes: int) -> Iterator[tuple[int, int]]:
    """`(start, stop)` of pieces that follow one another, each of about `most_bytes` or fewer, and of one piece at
    least."""
    ends = np.cumsum(nbytes)
    start, done = 0, 0
    while start < len(nbytes):
        stop = max(start + 1, int(np.searchsorted(ends, done + most_bytes, side="right")))
        yield start, stop
        start, done = stop, int(ends[stop - 1])


def given_up(pending: Pending) -> Callable[[], bool]:
    return lambda: pending.abandoned


def answer(pending: Pending, results: SpanResults) -> None:
    with contextlib.suppress(InvalidStateError):  # whoever asked cancelled the future itself: then nobody waits
        pending.set_result(results)
