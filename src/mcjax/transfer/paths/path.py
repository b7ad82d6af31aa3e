"""A path: a transport and a rail of it, what waits for it, and how it has done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mcjax.errors import StaleRegion, TransferCancelled, TransferError, TransferTimeout, Unencodable
from mcjax.transfer.base import Copy, Handle, Pacing, Rail, RailedTransport, Transport
from mcjax.transfer.paths.attempt import Attempt
from mcjax.transfer.paths.estimate import Estimate
from mcjax.transfer.paths.health import Health, Patience
from mcjax.transfer.paths.queue import ClassQueue
from mcjax.types import NS_PER_S


@dataclass(frozen=True, slots=True)
class PathSettings:
    """What all paths of an engine have in common."""

    link: tuple[float, float] = (1e9, 0.0)
    """Bytes a second and latency in seconds of a path that nothing is known of."""
    shares: Mapping[int, float] = field(default_factory=dict[int, float])
    patience: Patience = field(default_factory=Patience)
    slice_bytes: int | None = None
    """In place of what a paced transport says; None: that."""
    window_bytes: int | None = None


class Path:
    """Takes attempts, and gives them to the transport: at once, whole, to one that orders copies itself; else slice by
    slice, as classes and shares say, never more than the window at a time."""

    def __init__(self, transport: Transport, rail: Rail, rank: int, settings: PathSettings):
        self.transport = transport
        self.rank = rank
        """Of the transport, in the world's order of preference."""
        ends = f":{rail.local}>{rail.remote}" if rail.local or rail.remote else ""
        self.name = transport.name + ends
        self.group = f"{transport.name}:{rail.local}" if rail.local else transport.name
        """What it is counted with: the paths that leave by one NIC."""
        self.pacing = _pacing(transport, settings)
        self.health = Health(settings.patience)
        link_bytes_per_s, latency_s = settings.link
        self.estimate = Estimate(rail.bytes_per_s or link_bytes_per_s, latency_s)
        self.in_flight = 0
        """Slices that the mechanism has not answered, whoever still waits for them."""
        self.in_flight_bytes = 0
        self.waiting_bytes = 0
        """Of attempts that wait, whole or in part, as they came."""
        self.moved_bytes = 0
        self.attempts = 0
        self.failures = 0
        self.has_choice = bool(ends)
        """Whether its transport has other ways beside."""
        self._rail = rail
        self._railed: RailedTransport | None = transport if isinstance(transport, RailedTransport) else None
        self._queue: ClassQueue[Attempt] = ClassQueue(settings.shares)
        self._serving = False

    @property
    def queued(self) -> int:
        """Attempts that wait to begin, or to go on."""
        return len(self._queue)

    @property
    def queued_bytes(self) -> int:
        """What is to leave before a copy that comes now, if all are of one class."""
        return self.in_flight_bytes + self.waiting_bytes

    def enter(self, attempt: Attempt) -> None:
        """Begin the attempt now if nothing waits and there is room, or have it wait its turn."""
        self.attempts += 1
        if self.pacing is None:
            attempt.begin_slice()
            return
        if not len(self._queue) and self._has_room(attempt):
            attempt.begin_slice()
            if not attempt.wants_more:
                return
        self._wait(attempt)
        self.serve()

    def withdraw(self, attempt: Attempt) -> None:
        """The attempt waits no more."""
        before = len(self._queue)
        self._queue.discard(attempt)
        if len(self._queue) < before:
            self.waiting_bytes -= attempt.left_bytes()

    def settle(self, attempt: Attempt, took_ns: int, now_ns: int, is_probe: bool) -> None:
        """Learn from an attempt that is over, or was given up."""
        error = attempt.error
        if error is None and not attempt.given_up:
            self.health.succeeded(is_probe)
            self.estimate.learn(attempt.copy.source.nbytes, took_ns / NS_PER_S)
        elif isinstance(error, TransferError) and attempt.begun and not _blameless(attempt, error):
            self.failures += 1
            self.health.failed(now_ns, is_probe)
        else:
            self.health.undecided(is_probe)

    def serve(self) -> None:
        """Give the transport what it has room for, slice by slice."""
        queue = self._queue
        if self._serving or not len(queue):
            return  # a transport that answers at once comes by here while it is being served
        self._serving = True
        try:
            while (attempt := queue.peek()) is not None and self._has_room(attempt):
                queue.take()
                self.waiting_bytes -= attempt.left_bytes()
                if attempt.wants_more:
                    attempt.begin_slice()
                if attempt.wants_more:
                    self._wait(attempt)
                elif attempt.is_over:
                    attempt.wake()
        finally:
            self._serving = False

    def submit(self, copy: Copy) -> Handle:
        if self._railed is None:
            return self.transport.submit([copy], copy.priority)
        return self._railed.submit([copy], copy.priority, self._rail)

    def began(self, nbytes: int) -> None:
        self.in_flight += 1
        self.in_flight_bytes += nbytes

    def ended(self, nbytes: int) -> None:
        self.in_flight -= 1
        self.in_flight_bytes -= nbytes

    def _wait(self, attempt: Attempt) -> None:
        self._queue.push(attempt)
        self.waiting_bytes += attempt.left_bytes()

    def _has_room(self, attempt: Attempt) -> bool:
        pacing = self.pacing
        return (
            pacing is None
            or not self.in_flight_bytes
            or self.in_flight_bytes + attempt.next_bytes() <= pacing.window_bytes
        )


def _blameless(attempt: Attempt, error: TransferError) -> bool:
    """Whether it was the copy's fault, or the path was only slow: then slices have arrived on it."""
    if isinstance(error, TransferTimeout):
        return bool(attempt.arrived)
    return isinstance(error, StaleRegion | Unencodable | TransferCancelled)


def _pacing(transport: Transport, settings: PathSettings) -> Pacing | None:
    said: Pacing | None = getattr(transport, "pacing", None)
    if said is None:
        return None
    return Pacing(settings.slice_bytes or said.slice_bytes, settings.window_bytes or said.window_bytes)
