"""Endpoints whose batches are performed by blocking calls: one lane (a queue and a thread) a peer.

A peer that stands still holds up its own lane only; what waits in a lane is answered at its deadline all the same. A
lane that nobody uses ends.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import InvalidStateError
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import (
    AccessRefused,
    HandshakeRefused,
    StaleRegion,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from mcjax.transfer.transports.endpoint import (
    Capabilities,
    EndpointStats,
    Exposed,
    Notice,
    Pending,
    RegionDescriptor,
    SpanResults,
    Spans,
    failed,
)
from mcjax.transfer.transports.watchdog import Watchdog

LARGEST_BYTES = 1 << 62
"""More than any region has, whatever a descriptor claims."""

LOG = logging.getLogger(__name__)


class Held(Exposed, Protocol):
    """A region of this process, and whose it is now."""

    epoch: int


R = TypeVar("R", bound=Held)


@dataclass(slots=True, eq=False)
class Batch(Generic[R]):
    """Spans on their way, none of which lies outside its regions; `indices`: what whoever asked calls them, `[n]`."""

    write: bool
    local: R
    remote: RegionDescriptor
    spans: Spans
    indices: NDArray[np.int64]
    epoch: int
    """Of the local region when the batch was asked for."""
    deadline: float
    """By `time.monotonic()`."""
    checksums: bool = False
    notify: int | None = None
    pending: Pending = field(default_factory=Pending)
    errors: dict[int, TransferError] = field(default_factory=dict[int, TransferError])
    digests: dict[int, bytes] = field(default_factory=dict[int, bytes])
    count: int = 0
    """Spans that were asked for, refused ones too."""
    begun: bool = False
    watch: int = 0

    @property
    def left_s(self) -> float:
        """Until the deadline; below zero behind it."""
        return self.deadline - time.monotonic()


class LaneEndpoint(ABC, Generic[R]):
    """What lanes give an endpoint: `read`, `write`, `stats`, `close`. A subclass shows regions and performs batches.

    `idle_s`: seconds without a batch after which a lane ends and its peer is let go of.
    """

    name: str
    capabilities: Capabilities

    def __init__(self, address: str, idle_s: float = 300.0):
        self.address = address
        self._idle_s = idle_s
        self._lanes: dict[str, tuple[queue.SimpleQueue[Batch[R] | None], threading.Thread]] = {}
        self._lock = threading.Lock()
        self._notice: Notice | None = None
        self._stats = EndpointStats()
        self._watchdog = Watchdog(f"mcjax-{self.name}-deadlines")
        self._closing = threading.Event()
        self._unfinished: list[Batch[R]] = []

    @abstractmethod
    def _own(self, local: Exposed) -> R:
        """The region, if it is one of this endpoint's. Raises `AccessRefused`."""

    @abstractmethod
    def _perform(self, batch: Batch[R]) -> None:
        """Move the spans, and sum them if asked; on a lane's thread. What fails by itself goes to `batch.errors`.

        Raises a `TransferError` that holds for all of them; `TransferCancelled` soon after the endpoint began to close.
        """

    @abstractmethod
    def _end(self) -> None:
        """Let go of everything, when no lane is left: nothing touches a region any more when this returns."""

    def _part(self, address: str) -> None:
        """Let go of what is kept for a peer, on its lane's thread: nobody has asked for it for a while."""

    def _hurry(self) -> None:
        """The endpoint closes: have calls that block come back, where that can be done."""

    def read(
        self,
        local: Exposed,
        remote: RegionDescriptor,
        spans: Spans,
        *,
        deadline_s: float = 60.0,
        checksums: bool = False,
    ) -> Pending:
        return self._submit(False, local, remote, spans, deadline_s, checksums, None)

    def write(
        self,
        local: Exposed,
        remote: RegionDescriptor,
        spans: Spans,
        *,
        deadline_s: float = 60.0,
        checksums: bool = False,
        notify: int | None = None,
    ) -> Pending:
        return self._submit(True, local, remote, spans, deadline_s, checksums, notify)

    def on_notice(self, notice: Notice | None) -> None:
        self._notice = notice

    def stats(self) -> EndpointStats:
        return self._stats

    def close(self) -> None:
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            lanes = list(self._lanes.values())
        for jobs, _ in lanes:
            jobs.put(None)
        self._hurry()
        for _, thread in lanes:
            thread.join()
        self._watchdog.close()
        self._end()
        for batch in self._unfinished:  # only now does nothing write into their regions
            self._answer(batch, TransferCancelled(f"the endpoint {self.name} was closed"))

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise AccessRefused(f"the endpoint {self.name} is closed")

    def _submit(
        self,
        write: bool,
        local: Exposed,
        remote: RegionDescriptor,
        spans: Spans,
        deadline_s: float,
        checksums: bool,
        notify: int | None,
    ) -> Pending:
        count, deadline = len(spans), time.monotonic() + deadline_s
        try:
            if self._closing.is_set():
                raise TransferCancelled(f"the endpoint {self.name} is closed")
            region = self._own(local)
            if not write and not region.buffer.flags.writeable:
                raise AccessRefused("the local buffer is read-only")
            self._check_remote(remote, write, notify)
        except TransferError as refusal:
            return self._refused(Pending(), count, refusal)
        outside = spans.outside(region.nbytes, min(remote.nbytes, LARGEST_BYTES))
        good = np.delete(np.arange(count), outside)
        inside = Spans(spans.local[good], spans.remote[good], spans.nbytes[good]) if len(outside) else spans
        batch = Batch(write, region, remote, inside, good, region.epoch, deadline, checksums, notify, count=count)
        for index in outside.tolist():
            batch.errors[index] = AccessRefused("the span is not inside both regions")
        if not len(good):
            self._answer(batch, None)
            return batch.pending
        with self._lock:
            if not self._closing.is_set():
                self._stats.in_flight_bytes += inside.total_bytes
                batch.watch = self._watchdog.watch(deadline_s, lambda: self._late(batch))
                self._lane(remote.address).put(batch)
                return batch.pending
        return self._refused(batch.pending, count, TransferCancelled(f"the endpoint {self.name} is closed"))

    def _refused(self, pending: Pending, count: int, problem: TransferError) -> Pending:
        with self._lock:
            self._stats.spans += count
            self._stats.errors += count
        return failed(pending, count, lambda: type(problem)(problem.problem))

    def _check_remote(self, remote: RegionDescriptor, write: bool, notify: int | None) -> None:
        """Raises why a peer's region cannot be used so, as far as that is known here."""
        if not remote.address.startswith(f"{self.name}:"):
            raise HandshakeRefused(f"{remote.address!r} is no address of a {self.name} endpoint")
        if remote.epoch >= 1 << 64:
            raise StaleRegion(f"no region is in epoch {remote.epoch}")
        if write and not self.capabilities.write:
            raise AccessRefused(f"{self.name} only reads")
        if write and not remote.writable:
            raise AccessRefused("the region is not writable")
        if notify is not None and not self.capabilities.notify:
            raise AccessRefused(f"{self.name} carries no numbers with a write")

    def _lane(self, address: str) -> queue.SimpleQueue[Batch[R] | None]:
        if address not in self._lanes:
            jobs: queue.SimpleQueue[Batch[R] | None] = queue.SimpleQueue()
            name = f"mcjax-{self.name}-lane"
            thread = threading.Thread(target=self._work, args=(address, jobs), name=name, daemon=True)
            self._lanes[address] = (jobs, thread)
            thread.start()
        return self._lanes[address][0]

    def _late(self, batch: Batch[R]) -> None:
        if self._begin(batch):
            self._answer(batch, TransferTimeout("its turn had not come by its deadline"))

    def _begin(self, batch: Batch[R]) -> bool:
        """Whether it is the caller's to perform or to answer: of all that ask, one is told so."""
        with self._lock:
            begun, batch.begun = batch.begun, True
        return not begun

    def _work(self, address: str, jobs: queue.SimpleQueue[Batch[R] | None]) -> None:
        while True:
            try:
                batch = jobs.get(timeout=self._idle_s)
            except queue.Empty:
                self._part(address)
                with self._lock:
                    if jobs.empty() and not self._closing.is_set():
                        del self._lanes[address]
                        return
                continue
            if batch is None:
                return
            if not self._begin(batch):
                continue
            problem: TransferError | None = None
            try:
                if batch.pending.abandoned or self._closing.is_set():
                    raise TransferCancelled("given up before it began")
                self._perform(batch)
            except TransferError as error:
                problem = error
            except Exception as error:  # whatever went wrong must reach whoever waits, as a typed error
                LOG.exception("%s: a batch failed", self.name)
                problem = TransferError(f"{self.name}: {type(error).__name__}: {error}")
            if isinstance(problem, TransferCancelled) and self._closing.is_set():
                self._unfinished.append(batch)
            else:
                self._answer(batch, problem)

    def _answer(self, batch: Batch[R], problem: TransferError | None) -> None:
        self._watchdog.end(batch.watch)
        for index in batch.indices.tolist() if problem is not None else ():
            assert problem is not None
            batch.errors.setdefault(index, type(problem)(problem.problem))
        sums = batch.digests
        digests = (b"" if at in batch.errors else sums.get(at, b"") for at in range(batch.count))
        results = SpanResults(dict(sorted(batch.errors.items())), tuple(digests) if batch.checksums else ())
        arrived = ~np.isin(batch.indices, list(batch.errors))
        with self._lock:
            stats, nbytes = self._stats, int(batch.spans.nbytes[arrived].sum())
            stats.in_flight_bytes -= batch.spans.total_bytes
            stats.spans += batch.count
            stats.errors += len(batch.errors)
            stats.bytes_written += nbytes if batch.write else 0
            stats.bytes_read += 0 if batch.write else nbytes
        with contextlib.suppress(InvalidStateError):  # whoever asked may have cancelled the future itself
            batch.pending.set_result(results)
