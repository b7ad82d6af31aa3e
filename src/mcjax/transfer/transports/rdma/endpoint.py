"""The endpoint of RDMA verbs: regions, peers, and the thread that the card's completions drive.

A read or write is one question to the peer the first time (where the region lies, and the card's key for it), then only
the two cards' business. `docs/transfer-rdma.md` has the walk.
"""

from __future__ import annotations

import contextlib
import heapq
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import AccessRefused, ConfigError, TransferCancelled, TransferError, TransportUnavailable
from mcjax.transfer.transports.endpoint import (
    Capabilities,
    EndpointStats,
    Exposed,
    Guard,
    Notice,
    Pending,
    RegionDescriptor,
    SpanResults,
    Spans,
)
from mcjax.transfer.transports.rdma.batch import Batch
from mcjax.transfer.transports.rdma.incoming import Host, Incoming
from mcjax.transfer.transports.rdma.library import NAME, load
from mcjax.transfer.transports.rdma.loop import Loop
from mcjax.transfer.transports.rdma.memory import Region, Registrations
from mcjax.transfer.transports.rdma.outgoing import Home, Outgoing
from mcjax.transfer.transports.rdma.queue_pair import Card
from mcjax.transfer.transports.regions import check_exposable
from mcjax.transfer.transports.secret import Secret

_MOST_STRANGERS = 64
"""Connections at a time that have not proved the secret yet."""
_GREETING_S = 10.0
_ANY_HOST = ("", "0.0.0.0", "::")
_MOST_REGION_BYTES = 1 << 62
_MOST_EPOCHS = 1 << 62


class RdmaEndpoint:
    """One process's end of RDMA. `host`, `port`: where its control connection listens (0: any free port), and
    `advertised` (`host:port`) where peers find it, if elsewhere; numbers, not names. `device`, `gid_index`: which card
    and which of its addresses, else the best there is; `device_port`: of the card.

    Raises `TransportUnavailable` where the machine has no RDMA, `ConfigError` for a device or address that it has not.
    """

    capabilities: Capabilities = Capabilities(notify=True, one_sided=True)

    def __init__(
        self,
        secret: Secret,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertised: str | None = None,
        device: str | None = None,
        gid_index: int | None = None,
        device_port: int = 1,
    ):
        if advertised is None and host in _ANY_HOST:
            raise ConfigError("rdma.host", repr(host), "peers cannot connect to that: say what is advertised")
        self.name = NAME
        self._card = Card(load(), device, gid_index, device_port)
        self._registrations = Registrations(self._card.verbs, self._card.domain)
        self._listener = self._listening(host, port)
        self.address = advertised or _address(*self._listener.getsockname()[:2])
        self._regions: dict[int, Region] = {}
        self._stats = EndpointStats()
        self._notice: Notice | None = None
        self._outgoing: dict[str, Outgoing] = {}
        self._incoming: dict[Incoming, None] = {}
        self._deadlines: list[tuple[float, int, Batch]] = []
        self._batches = 0
        self._closed = False
        self._closing = threading.RLock()
        self._loop = Loop(f"mcjax-{NAME}", self._tick)
        self._home = Home(self._card, secret, self._loop, self._answered, self._peer_gone)
        self._host = Host(
            self._card, secret, self._loop, self._regions, self._stats, lambda: self._notice, self._caller_gone
        )
        self._loop.call(lambda: self._loop.watch(self._listener, selectors.EVENT_READ, self._accept))

    @property
    def device(self) -> str:
        """Of the card, as the kernel calls it."""
        return self._card.gid.device

    @property
    def gid_index(self) -> int:
        return self._card.gid.index

    @property
    def numa_node(self) -> int | None:
        """Of the memory that the card is next to, if it is next to any."""
        return self._card.numa_node

    # --- regions

    def expose(
        self,
        buffer: NDArray[np.uint8],
        *,
        writable: bool = True,
        guard: Guard | None = None,
        layout: Mapping[str, Any] | None = None,
    ) -> Exposed:
        """Pins the buffer's pages. Raises `AccessRefused` for memory that cannot be registered with the card."""
        check_exposable(buffer, writable)
        with self._closing:
            if self._closed:
                raise AccessRefused("the endpoint is closed")
            key = secrets.randbits(64)
            region = Region(
                key, buffer, self._registrations, self._describe, self._changed, writable, guard, dict(layout or {})
            )
            self._regions[key] = region
        return region

    def withdraw(self, exposed: Exposed) -> None:
        """When this returns, no card touches the buffer any more, for us or for a peer."""
        with self._closing:
            if self._closed or not isinstance(exposed, Region) or self._regions.get(exposed.key) is not exposed:
                return
            withdrawn = self._loop.start(lambda: self._withdraw(exposed))
        withdrawn.result()

    def _withdraw(self, region: Region) -> None:
        del self._regions[region.key]
        for peer in list(self._outgoing.values()):
            peer.withdraw(region)
        region.close()
        self._forget(region)

    def _describe(self, region: Region) -> RegionDescriptor:
        return RegionDescriptor(
            self.address, region.key, region.nbytes, region.epoch, region.writable, layout=region.layout
        )

    def _changed(self, region: Region) -> None:
        self._loop.call(lambda: self._forget(region))

    def _forget(self, region: Region) -> None:
        for caller in list(self._incoming):
            caller.forget(region.key)

    # --- transfers

    def read(
        self,
        local: Exposed,
        remote: RegionDescriptor,
        spans: Spans,
        *,
        deadline_s: float = 60.0,
        checksums: bool = False,
    ) -> Pending:
        """The card writes into `local` while nobody looks: of spans that failed, any bytes may have arrived."""
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
        """With `checksums` the peer is asked for them: they are of what lies there. Raises `ValueError` for a number to
        notify of that has more than 32 bits."""
        if notify is not None and not 0 <= notify < 1 << 32:
            raise ValueError(f"notify is {notify}, and has to be a number of 32 bits")
        return self._submit(True, local, remote, spans, deadline_s, checksums, notify)

    def on_notice(self, notice: Notice | None) -> None:
        """Called on the endpoint's thread: it must not take long."""
        self._notice = notice

    def stats(self) -> EndpointStats:
        return self._stats

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
        pending = Pending()
        # From now on nobody can cancel the future itself: it has to be answered.
        pending.set_running_or_notify_cancel()
        if not isinstance(local, Region):
            pending.set_result(_all_failed(len(spans), lambda: AccessRefused("the local region is another endpoint's")))
            return pending
        deadline_s += time.monotonic()
        batch = Batch(write, local, remote, spans, pending, deadline_s, checksums, notify)
        outside = spans.outside(local.nbytes, min(remote.nbytes, _MOST_REGION_BYTES))
        batch.fail(map(int, outside), lambda: AccessRefused("outside the region"))
        if remote.nbytes > _MOST_REGION_BYTES or remote.epoch > _MOST_EPOCHS:
            batch.fail_all(lambda: AccessRefused("no region is so large, or so old"))
        if write and not remote.writable:
            batch.fail_all(lambda: AccessRefused("the region is not writable"))
        if not write and not local.buffer.flags.writeable:
            batch.fail_all(lambda: AccessRefused("the local region is not writable"))
        with self._closing:
            if not self._closed:
                self._loop.call(lambda: self._begin(batch))
                return pending
        pending.set_result(_all_failed(len(spans), lambda: TransferCancelled("the endpoint is closed")))
        return pending

    def _begin(self, batch: Batch) -> None:
        self._stats.in_flight_bytes += batch.spans.total_bytes
        try:
            if self._regions.get(batch.local.key) is not batch.local:
                raise AccessRefused("the local region is not this endpoint's, or was withdrawn")
            peer = self._outgoing.get(batch.remote.address)
            if peer is None and (batch.open_spans() or batch.notify is not None):
                peer = self._outgoing[batch.remote.address] = Outgoing(self._home, batch.remote.address)
        except TransferError as problem:
            kind, why = type(problem), problem.problem
            batch.fail_all(lambda: kind(why))
            peer = None
        if peer is None or (len(batch.spans) and not batch.open_spans()):
            self._answered(batch)
            batch.ended = True
            batch.answer({})
            return
        self._batches += 1
        heapq.heappush(self._deadlines, (batch.deadline_s, self._batches, batch))
        peer.submit(batch)

    def _answered(self, batch: Batch) -> None:
        stats = self._stats
        stats.in_flight_bytes -= batch.spans.total_bytes
        stats.spans += len(batch.spans)
        stats.errors += len(batch.errors)
        if batch.write:
            stats.bytes_written += batch.moved_bytes()
        else:
            stats.bytes_read += batch.moved_bytes()

    # --- peers

    def _listening(self, host: str, port: int) -> socket.socket:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as problem:
            self._card.close()
            fix = "choose another host or port"
            raise TransportUnavailable(NAME, f"cannot listen on {host}:{port} ({problem})", fix) from None
        listener.setblocking(False)
        return listener

    def _accept(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            strangers = [caller for caller in self._incoming if not caller.proved]
            if len(strangers) >= _MOST_STRANGERS:
                strangers[0].close()
            self._incoming[Incoming(self._host, connection, time.monotonic() + _GREETING_S)] = None

    def _peer_gone(self, peer: Outgoing) -> None:
        if self._outgoing.get(peer.address) is peer:
            del self._outgoing[peer.address]

    def _caller_gone(self, caller: Incoming) -> None:
        self._incoming.pop(caller, None)

    def _tick(self) -> float | None:
        """Tell those whose time is over; in how many seconds the next one's will be."""
        now_s = time.monotonic()
        late: dict[str, None] = {}
        while self._deadlines and (self._deadlines[0][0] <= now_s or self._deadlines[0][2].ended):
            batch = heapq.heappop(self._deadlines)[2]
            if not batch.ended:
                late[batch.remote.address] = None
        for address in late:
            if address in self._outgoing:
                self._outgoing[address].expire(now_s)
        strangers = [caller for caller in self._incoming if not caller.proved]
        for caller in strangers:
            if caller.deadline_s <= now_s:
                caller.close()
        times = [self._deadlines[0][0]] if self._deadlines else []
        times += [caller.deadline_s for caller in strangers if caller in self._incoming]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def close(self) -> None:
        """Answers what is pending, closes every connection and registration, ends the thread."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._loop.start(self._shut).result()
        self._loop.stop()
        for region in self._regions.values():
            region.close()
        self._regions.clear()
        self._card.close()

    def _shut(self) -> None:
        self._loop.forget(self._listener)
        self._listener.close()
        for peer in list(self._outgoing.values()):
            peer.fail(lambda: TransferCancelled("the endpoint was closed"))
        for caller in list(self._incoming):
            caller.close()


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _all_failed(count: int, error: Callable[[], TransferError]) -> SpanResults:
    return SpanResults({index: error() for index in range(count)}, (b"",) * count)
