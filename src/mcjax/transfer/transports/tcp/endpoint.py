"""An `Endpoint` over TCP, between processes of one host or of many."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import AccessRefused, ConfigError, StaleRegion, TransferCancelled, TransferError, TransportUnavailable
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
from mcjax.transfer.transports.secret import Secret
from mcjax.transfer.transports.tcp.batch import Batch, given_up
from mcjax.transfer.transports.tcp.dial import Dialer, format_address
from mcjax.transfer.transports.tcp.door import Door
from mcjax.transfer.transports.tcp.frames import MOST_SPAN_BYTES
from mcjax.transfer.transports.tcp.peer import Limits, Peer
from mcjax.transfer.transports.tcp.regions import Region, Regions
from mcjax.transfer.transports.tcp.server import FrameServer, Session
from mcjax.transfer.transports.tcp.tls import Tls
from mcjax.transfer.transports.tcp.watch import Watch
from mcjax.transfer.transports.tcp.wire import wire_of

LOG = logging.getLogger(__name__)

BACKLOG = 128
ANY_ADDRESS = ("0.0.0.0", "::", "")


class TcpEndpoint:
    """Shows regions to peers that know `secret`, and reads and writes theirs.

    Args:
        host: address to bind. Loopback unless another one is given.
        port: 0 for any that is free.
        advertised: what peers connect to (`host:port`), where that differs from what is bound.
        connections: to each peer, at most; opened when there is work for them.
        most_connections: from peers, at most; whoever comes after that is refused.
        handshake_s: seconds that either side has to prove itself.
        stall_s: seconds after which a peer that has begun a frame, and neither sends nor takes a byte, is disconnected.
        idle_s: seconds after which a connection that nobody uses is closed by who opened it.
        tls: to encrypt and authenticate what goes over the connections. All peers have it, or none.
    """

    name = "tcp"
    capabilities = Capabilities(notify=True, largest_span_bytes=MOST_SPAN_BYTES)

    def __init__(
        self,
        secret: Secret,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertised: str | None = None,
        connections: int = 2,
        most_connections: int = 256,
        handshake_s: float = 5.0,
        stall_s: float = 30.0,
        idle_s: float = 300.0,
        tls: Tls | None = None,
    ):
        """Raises `TransportUnavailable` if the address cannot be bound, `ConfigError` for what cannot work."""
        for key, value in (("connections", connections), ("most_connections", most_connections)):
            if value < 1:
                raise ConfigError(f"tcp.{key}", value, "must be at least 1")
        for key, limit_s in (("handshake_s", handshake_s), ("stall_s", stall_s), ("idle_s", idle_s)):
            if not 0 < limit_s < 1e6:
                raise ConfigError(f"tcp.{key}", limit_s, "must be more than 0 seconds")
        if advertised is None and host in ANY_ADDRESS:
            raise ConfigError("tcp.host", repr(host), "peers cannot connect to that: say what is advertised")
        listener = _listen(host, port)
        self.address = advertised or format_address(host, listener.getsockname()[1])
        self._stall_s = stall_s
        self._most_connections = most_connections
        self._limits = Limits(connections, idle_s)
        self._dialer = Dialer(secret, tls, handshake_s)
        self._regions = Regions()
        self._server = FrameServer(self._regions)
        self._lock = threading.Lock()
        """Of what is below."""
        self._sessions: dict[Session, None] = {}
        self._peers: dict[str, Peer] = {}
        self._stats = EndpointStats()
        self._closed = False
        self._watch = Watch(self._late)
        self._door = Door(
            listener,
            secret,
            full=lambda: len(self._sessions) >= most_connections,
            admit=self._admit,
            turn_away=lambda: self._server.count_refused(1),
            handshake_s=handshake_s,
            tls=None if tls is None else tls.server,
        )

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
        return self._start(local, remote, spans, deadline_s, checksums, writing=False)

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
        """As `Endpoint.write`. The number is told when every span has arrived; if one has not, nobody is told."""
        return self._start(local, remote, spans, deadline_s, checksums, writing=True, notify=notify)

    def on_notice(self, notice: Notice | None) -> None:
        self._server.notice = notice

    def stats(self) -> EndpointStats:
        """A copy, as of now."""
        with self._lock:
            stats = self._stats
            return EndpointStats(
                stats.bytes_read,
                stats.bytes_written,
                stats.spans,
                stats.errors,
                self._server.refused,
                stats.in_flight_bytes,
            )

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            peers = list(self._peers.values())
        self._door.close()
        for peer in peers:
            peer.close()
        self._watch.close()
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.interrupt()
        for session in sessions:
            session.join()
        self._regions.withdraw_all()

    def _start(
        self,
        local: Exposed,
        remote: RegionDescriptor,
        spans: Spans,
        deadline_s: float,
        checksums: bool,
        writing: bool,
        notify: int | None = None,
    ) -> Pending:
        try:
            region = self._own(local, to_write=not writing)
            if notify is not None and not 0 <= notify < 1 << 32:
                raise AccessRefused(f"a number of 32 bits goes along, not {notify}")
            if remote.epoch >= 1 << 64:
                raise StaleRegion(f"no region is in epoch {remote.epoch}")
            deadline = time.monotonic() + deadline_s
            batch = Batch(region, remote, spans, writing=writing, checksums=checksums, notify=notify, deadline=deadline)
            with self._lock:
                peer = self._peer(remote.address)
                self._stats.in_flight_bytes += batch.total
        except TransferError as problem:
            return self._refuse(spans, problem)
        batch.pending.give_up = lambda: peer.give_up(batch, given_up())
        peer.submit(batch)
        return batch.pending

    def _refuse(self, spans: Spans, problem: TransferError) -> Pending:
        with self._lock:
            self._stats.spans += len(spans)
            self._stats.errors += len(spans)
        return failed(Pending(), len(spans), lambda: problem)

    def _own(self, local: Exposed, to_write: bool) -> Region:
        if not isinstance(local, Region) or not self._regions.knows(local):
            raise AccessRefused("the local region is not one of this endpoint's")
        if to_write and not local.buffer.flags.writeable:
            raise AccessRefused("the local buffer is read-only")
        return local

    def _peer(self, address: str) -> Peer:
        """With the lock held."""
        if self._closed:
            raise TransferCancelled("the endpoint is closed")
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = Peer(address, self._dialer, self._limits, self._watch.add, self._answered)
        return peer

    def _late(self, batch: Batch) -> None:
        self._peers[batch.remote.address].expire(batch)

    def _answered(self, batch: Batch) -> None:
        self._watch.remove(batch)
        arrived = batch.total
        lost = sum(int(batch.spans.nbytes[index]) for index in batch.errors)
        with self._lock:
            stats = self._stats
            stats.in_flight_bytes -= arrived
            stats.spans += len(batch.spans) + len(batch.refused)
            stats.errors += len(batch.errors) + len(batch.refused)
            if batch.writing:
                stats.bytes_written += arrived - lost
            else:
                stats.bytes_read += arrived - lost

    def _admit(self, sock: socket.socket) -> None:
        """Serve a peer that has proved itself."""
        session = Session(wire_of(sock, self._stall_s), self._server, self._leave)
        with self._lock:
            self._sessions[session] = None
        try:
            session.start()
        except RuntimeError as problem:
            LOG.warning("a peer cannot be served: %s", problem)
            self._leave(session)

    def _leave(self, session: Session) -> None:
        with self._lock:
            del self._sessions[session]


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _kind, _protocol, _name, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as undo:
            listener = socket.socket(family, socket.SOCK_STREAM)
            undo.callback(listener.close)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
            undo.pop_all()
            return listener
    except OSError as problem:
        where = format_address(host, port)
        fix = "give an address of this machine and a free port (0 for any)"
        raise TransportUnavailable("tcp", f"cannot listen on {where} ({problem.strerror or problem})", fix) from None
