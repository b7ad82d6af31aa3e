"""A batch on its way to one peer: cut into parts, each of which is one frame on one connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import AccessRefused, StaleRegion, TransferCancelled, TransferError
from mcjax.transfer.transports.endpoint import Pending, RegionDescriptor, SpanResults, Spans
from mcjax.transfer.transports.tcp.frames import MOST_SPANS, Status
from mcjax.transfer.transports.tcp.regions import Region

PART_BYTES = 16 << 20
"""Of one part, unless a single span has more: others wait for a connection that long, and a round trip between two
parts costs nothing beside it."""
PART_SPANS = MOST_SPANS // 16


class Carrier(Protocol):
    """The connection that a part is on."""

    def interrupt(self, part: Part, why: TransferError) -> None: ...


@dataclass(eq=False)
class Part:
    """Some spans of a batch. `start`, `stop`: which. What a carrier finds out lands in `errors` and `digests`."""

    batch: Batch
    start: int
    stop: int
    total: int
    """Bytes."""
    notify: int | None = None
    errors: dict[int, TransferError] = field(default_factory=dict[int, TransferError])
    """By index in the batch."""
    digests: list[bytes] = field(default_factory=list[bytes])
    """Of each of its spans, if wanted."""
    cut_off: TransferError | None = None
    """Set when its deadline has passed, for a carrier that was just about to take it."""
    _carrier: Carrier | None = None

    @property
    def carrier(self) -> Carrier:
        assert self._carrier is not None  # since it has begun
        return self._carrier

    @property
    def local(self) -> NDArray[np.int64]:
        return self.batch.spans.local[self.start : self.stop]

    @property
    def remote(self) -> NDArray[np.int64]:
        return self.batch.spans.remote[self.start : self.stop]

    @property
    def nbytes(self) -> NDArray[np.int64]:
        return self.batch.spans.nbytes[self.start : self.stop]

    def begin(self, carrier: Carrier) -> None:
        self._carrier = carrier

    def fail(self, error: TransferError) -> None:
        """All of its spans that have not failed before."""
        for index in range(self.start, self.stop):
            self.errors.setdefault(index, error)

    def interrupt(self) -> None:
        """Called by the local region, for a part that does not leave it."""
        self.carrier.interrupt(self, self.local_problem())

    def local_problem(self) -> TransferError:
        """What has become of the local region."""
        return local_error(self.batch.local.status(self.batch.epoch))


class BatchPending(Pending):
    """A `Pending` that has its batch told when it is given up."""

    give_up: Callable[[], object] | None = None

    def abandon(self) -> None:
        super().abandon()
        if self.give_up is not None:
            self.give_up()


class Batch:
    """All of it, and what is known of its end. The peer's lock protects it; `results` is for when it is over."""

    def __init__(
        self,
        local: Region,
        remote: RegionDescriptor,
        spans: Spans,
        *,
        writing: bool,
        checksums: bool,
        notify: int | None,
        deadline: float,
    ):
        outside = _outside(spans, local.nbytes, remote.nbytes)
        self.positions: list[int] = np.setdiff1d(np.arange(len(spans)), outside).tolist() if outside else []
        """Of the spans that are left, among all that were asked for, if some are not inside both regions."""
        self.refused: dict[int, TransferError] = {
            index: AccessRefused("the span is not inside both regions") for index in outside
        }
        if outside:
            spans = Spans(spans.local[self.positions], spans.remote[self.positions], spans.nbytes[self.positions])
        self.total = spans.total_bytes if len(spans) != 1 else int(spans.nbytes[0])
        self.local = local
        self.epoch = local.epoch
        self.remote = remote
        self.spans = spans
        self.writing = writing
        self.checksums = checksums
        self.deadline = deadline
        """By `time.monotonic()`."""
        self.pending = BatchPending()
        self.pending.set_running_or_notify_cancel()  # so that nobody can cancel the future itself
        self.errors: dict[int, TransferError] = {}
        self.digests = [b""] * len(spans) if checksums else []
        self.waiting: deque[Part] = deque(self._cut())
        self.begun: dict[Part, None] = {}
        self.last: Part | None = None
        """Carries the number that the peer is told, and so has to go when all others have arrived."""
        if notify is not None and not self.refused:
            self.waiting[-1].notify = notify
            if len(self.waiting) > 1:
                self.last = self.waiting.pop()

    @property
    def over(self) -> bool:
        return not self.waiting and not self.begun and self.last is None

    def begin(self, carrier: Carrier) -> Part:
        """The next part, which `carrier` takes."""
        part = self.waiting.popleft()
        part.begin(carrier)
        self.begun[part] = None
        return part

    def finish(self, part: Part) -> None:
        """What became of a part that had begun."""
        del self.begun[part]
        self.errors.update(part.errors)
        if self.checksums:
            for index, digest in enumerate(part.digests, part.start):
                self.digests[index] = digest
        if self.last is not None and not self.waiting and not self.begun:
            if self.errors:
                self.last.notify = None
            self.waiting.append(self.last)
            self.last = None

    def fail_waiting(self, error: TransferError) -> None:
        """What has not begun never will."""
        if self.last is not None:
            self.waiting.append(self.last)
            self.last = None
        while self.waiting:
            part = self.waiting.popleft()
            part.fail(error)
            self.errors.update(part.errors)

    def answer(self) -> None:
        """Once, when it is over, and without any lock: callbacks run here."""
        for index in self.errors if self.digests else ():
            self.digests[index] = b""
        errors, digests = self.errors, self.digests
        if self.refused:
            count = len(self.positions) + len(self.refused)
            errors = {self.positions[index]: error for index, error in errors.items()} | self.refused
            if self.checksums:
                digests = [b""] * count
                for position, digest in zip(self.positions, self.digests, strict=True):
                    digests[position] = digest
        self.pending.set_result(SpanResults(dict(sorted(errors.items())), tuple(digests)))

    def _cut(self) -> list[Part]:
        nbytes = self.spans.nbytes
        if not len(nbytes):
            return []
        if len(nbytes) <= PART_SPANS and self.total <= PART_BYTES:
            return [Part(self, 0, len(nbytes), self.total)]
        parts: list[Part] = []
        ends = np.cumsum(nbytes)
        start, done = 0, 0
        while start < len(nbytes):
            fit = int(np.searchsorted(ends, done + PART_BYTES, side="right"))
            stop = min(max(fit, start + 1), start + PART_SPANS)
            end = int(ends[stop - 1])
            parts.append(Part(self, start, stop, end - done))
            start, done = stop, end
        return parts


def _outside(spans: Spans, local_bytes: int, remote_bytes: int) -> list[int]:
    """`Spans.outside`, also for what a descriptor may claim: no more than 2^62 bytes are believed."""
    if len(spans) == 1:  # NumPy would take several times as long
        nbytes = int(spans.nbytes[0])
        fits = 0 <= int(spans.local[0]) <= local_bytes - nbytes and 0 <= int(spans.remote[0]) <= remote_bytes - nbytes
        return [] if fits and nbytes >= 1 else [0]
    return spans.outside(local_bytes, min(remote_bytes, 1 << 62)).tolist()


def local_error(status: int) -> TransferError:
    """What the status of a span of the local region means to whoever asked."""
    match status:
        case Status.STALE:
            return StaleRegion("the local region has changed hands")
        case Status.WITHDRAWN:
            return AccessRefused("the local region was withdrawn")
        case _:
            return TransferError("the local region's guard failed")


def given_up() -> TransferError:
    return TransferCancelled("given up before it began")
