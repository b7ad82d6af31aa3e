"""Endpoints of one process: memory to memory, on the caller's thread or on a few of their own.

For worlds whose instances share a process, and the measure of what the others lose between processes.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import AccessRefused, HandshakeRefused, PeerLost, StaleRegion, TransferCancelled, TransferError
from mcjax.transfer.transports.endpoint import (
    Capabilities,
    EndpointStats,
    Exposed,
    Guard,
    Notice,
    Pending,
    RegionDescriptor,
    Spans,
    failed,
)
from mcjax.transfer.transports.job import Job, Use, answer, given_up
from mcjax.transfer.transports.regions import Region, Regions
from mcjax.transfer.transports.secret import Secret

LOG = logging.getLogger(__name__)


class Switchboard:
    """Where the local endpoints of a process find one another."""

    def __init__(self) -> None:
        self._by_address: dict[str, LocalEndpoint] = {}
        self._lock = threading.Lock()

    def add(self, endpoint: LocalEndpoint) -> None:
        with self._lock:
            self._by_address[endpoint.address] = endpoint

    def remove(self, endpoint: LocalEndpoint) -> None:
        with self._lock:
            self._by_address.pop(endpoint.address, None)

    def find(self, address: str) -> LocalEndpoint:
        """Raises `PeerLost`."""
        endpoint = self._by_address.get(address)
        if endpoint is None:
            raise PeerLost(f"no endpoint of this process is at {address}")
        return endpoint


class LocalEndpoint:
    """An `Endpoint` for peers on the same `switchboard`.

    Args:
        secret: those of two endpoints must be equal.
        threads: that copy what is not small.
        inline_bytes: a batch of at most so many bytes is copied before `read` or `write` returns.
    """

    name = "local"
    capabilities = Capabilities(
        notify=True, views=True, death=False, stopped=False, versioned=False, other_host=False, process=False
    )

    def __init__(self, secret: Secret, switchboard: Switchboard, threads: int = 2, inline_bytes: int = 64 << 10):
        self.address = f"local:{secrets.token_hex(8)}"
        self._secret = secret
        self._switchboard = switchboard
        self._inline_bytes = inline_bytes
        self._regions: Regions[Region] = Regions()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="mcjax-local")
        self._stats = EndpointStats()
        self._counting = threading.Lock()
        self._notice: Notice | None = None
        self._closed = False
        switchboard.add(self)

    def expose(
        self,
        buffer: NDArray[np.uint8],
        *,
        writable: bool = True,
        guard: Guard | None = None,
        layout: Mapping[str, Any] | None = None,
    ) -> Region:
        if self._closed:
            raise AccessRefused("the endpoint is closed")
        return self._regions.add(Region(self.address, buffer, writable, guard, layout))

    def withdraw(self, exposed: Exposed) -> None:
        if isinstance(exposed, Region):
            self._regions.withdraw(exposed)

    def read(
        self,
        local: Exposed,
        remote: RegionDescriptor,
        spans: Spans,
        *,
        deadline_s: float = 60.0,
        checksums: bool = False,
    ) -> Pending:
        """As `Endpoint.read`; a small batch is answered when this returns."""
        pending = Pending()
        try:
            near, far = self._own(local), self._peer(remote.address)._show(remote, self._secret)
            if not near.buffer.flags.writeable:
                raise AccessRefused("the local buffer is read-only")
        except TransferError as problem:
            return self._refuse(pending, spans, problem)
        target = Use(near, near.epoch, writing=True, guarded=False)
        source = Use(far, remote.epoch, writing=False, guarded=True)
        job = Job(spans, time.monotonic() + deadline_s, checksums, given_up(pending))
        return self._start(pending, job, target, source, reading=True)

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
        """As `Endpoint.write`; a small batch is answered when this returns."""
        pending = Pending()
        try:
            peer = self._peer(remote.address)
            near, far = self._own(local), peer._show(remote, self._secret, writing=True)
        except TransferError as problem:
            return self._refuse(pending, spans, problem)
        target = Use(far, remote.epoch, writing=True, guarded=True)
        source = Use(near, near.epoch, writing=False, guarded=False)
        turned = Spans(spans.remote, spans.local, spans.nbytes)
        job = Job(turned, time.monotonic() + deadline_s, checksums, given_up(pending))
        return self._start(pending, job, target, source, None if notify is None else (peer, far.key, notify))

    @contextlib.contextmanager
    def view(self, remote: RegionDescriptor, offset: int, nbytes: int) -> Generator[NDArray[np.uint8]]:
        """The peer's bytes themselves, `[nbytes]`, read-only, for the body of a `with`; what is to last has to be
        copied. Raises `StaleRegion` at the end if they changed hands meanwhile: what was read is then worth nothing.
        """
        region = self._peer(remote.address)._show(remote, self._secret)
        use = Use(region, remote.epoch, writing=False, guarded=True)
        if Spans.of([(0, offset, nbytes)]).outside(nbytes, region.nbytes).size:
            raise AccessRefused("the view is not inside the region")
        _insist(use, offset, nbytes, "before")
        array = region.buffer[offset : offset + nbytes]
        array.flags.writeable = False
        yield array
        _insist(use, offset, nbytes, "while")

    def on_notice(self, notice: Notice | None) -> None:
        self._notice = notice

    def stats(self) -> EndpointStats:
        return self._stats

    def close(self) -> None:
        self._closed = True
        self._switchboard.remove(self)
        self._threads.shutdown()
        self._regions.withdraw_all()

    def _own(self, local: Exposed) -> Region:
        if self._closed:
            raise TransferCancelled("the endpoint is closed")
        if not isinstance(local, Region) or not self._regions.knows(local):
            raise AccessRefused("the local region is not one of this endpoint's")
        return local

    def _peer(self, address: str) -> LocalEndpoint:
        return self._switchboard.find(address)

    def _show(self, remote: RegionDescriptor, secret: Secret, writing: bool = False) -> Region:
        """The region, for a peer that has a descriptor of it. Raises what the peer is told."""
        try:
            if not self._secret.proves(secret.proof(self.address.encode()), self.address.encode()):
                raise HandshakeRefused("the endpoint has another secret")
            region = self._regions.find(remote.key)
            if writing and not region.writable:
                raise AccessRefused("the region is not writable")
        except TransferError:
            with self._counting:
                self._stats.refused += 1
            raise
        return region

    def _refuse(self, pending: Pending, spans: Spans, problem: TransferError) -> Pending:
        with self._counting:
            self._stats.spans += len(spans)
            self._stats.errors += len(spans)
        return failed(pending, len(spans), lambda: problem)

    def _start(
        self,
        pending: Pending,
        job: Job,
        target: Use,
        source: Use,
        notify: tuple[LocalEndpoint, int, int] | None = None,
        reading: bool = False,
    ) -> Pending:
        nbytes = job.spans.total_bytes
        with self._counting:
            self._stats.in_flight_bytes += nbytes

        def work() -> None:
            results = job.perform(target, source)
            arrived = nbytes - sum(int(job.spans.nbytes[index]) for index in results.errors)
            with self._counting:
                self._stats.in_flight_bytes -= nbytes
                self._stats.spans += len(job.spans)
                self._stats.errors += len(results.errors)
                if reading:
                    self._stats.bytes_read += arrived
                else:
                    self._stats.bytes_written += arrived
            if notify is not None and not results.errors:
                peer, *what = notify
                peer._tell(*what)
            answer(pending, results)

        if nbytes <= self._inline_bytes:
            work()
        else:
            try:
                self._threads.submit(work)
            except RuntimeError:  # closed meanwhile
                return self._refuse(pending, job.spans, TransferCancelled("the endpoint is closed"))
        return pending

    def _tell(self, key: int, number: int) -> None:
        tell(self._notice, key, number)


def tell(notice: Notice | None, key: int, number: int) -> None:
    """Tell whoever wants to know of a peer's write; what goes wrong there is not the writer's business."""
    try:
        if notice is not None:
            notice(key, number)
    except Exception:
        LOG.exception("on_notice raised for number %d", number)


def _insist(use: Use, offset: int, nbytes: int, when: str) -> None:
    problem = use.enter()
    if problem is None:
        problem = use.leave()
    if problem is not None:
        raise problem
    if not use.allows(offset, nbytes):
        raise StaleRegion(f"the bytes changed hands {when} they were looked at")
