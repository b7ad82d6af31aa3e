"""JAX arrays from mesh to mesh: inside a process by `jax.device_put`, between processes by `jax.experimental.transfer`.

The only module of `transfer` that imports jax, and imported by whoever wants it only.
"""

# pyright: standard
# Array types end at jax's own annotations.

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from numpy.typing import NDArray

from mcjax.errors import (
    AccessRefused,
    PeerLost,
    StaleRegion,
    TransferCancelled,
    TransferError,
    TransferTimeout,
    TransportUnavailable,
)
from mcjax.transfer.transports.copying import digest_of
from mcjax.transfer.transports.endpoint import Capabilities, EndpointStats, Exposed, Guard, RegionDescriptor
from mcjax.transfer.transports.jax_offers import KIND, MOST_OFFER_BYTES, Offer, OfferClient, OfferServer
from mcjax.transfer.transports.job import Pieces, chunks, cut
from mcjax.transfer.transports.lanes import Batch, LaneEndpoint
from mcjax.transfer.transports.secret import Secret
from mcjax.transfer.transports.tcp.dial import Dialer, format_address
from mcjax.transfer.transports.tcp.door import Door
from mcjax.transfer.transports.tcp.frames import FrameError, Status, error_of
from mcjax.transfer.transports.tcp.regions import Region, Regions
from mcjax.transfer.transports.tcp.server import Session
from mcjax.transfer.transports.tcp.wire import Disconnected, Stalled, Wire, wire_of

Device: TypeAlias = Any
"""A `jax.Device`, which type checkers take for a variable."""
Array: TypeAlias = Any
"""A `jax.Array`: theirs knows nothing of `is_ready`."""

GROUP_BYTES = 16 << 20
"""Pulled in one go, if the spans are not longer: enough to cost nothing beside, and little to be kept twice."""
MOST_GROUP_SPANS = 1 << 15
SPIN_S = 0.0005
"""How long an array is looked at without a pause: a pull of some KiB takes this long."""
MOST_DRAINED = 16
MOST_PAUSE_S = 0.001
"""How late an arrival, a deadline or an end may be noticed."""

assert GROUP_BYTES <= MOST_OFFER_BYTES


def moved(array: Array, sharding: jax.sharding.Sharding) -> Array:
    """The same values laid out as `sharding` says, on its devices, when they are there.

    The two meshes may differ in devices and in how many parts an axis has: the runtime cuts and joins. On a device that
    holds the array already so, the result may be the array itself.
    """
    return jax.block_until_ready(jax.device_put(array, sharding))


def fitted(array: Array, rows: int) -> Array:
    """The array with `rows` rows: those that are too many cut off, those that lack added, as zeros."""
    if array.shape[0] == rows:
        return array
    if array.shape[0] > rows:
        return array[:rows]
    return jax.numpy.pad(array, [(0, rows - array.shape[0]), *[(0, 0)] * (array.ndim - 1)])


class _Stores:
    """JAX's side of an endpoint: one transfer server, what it offers, and pulls from others' servers.

    A pull has no time-out, and none can be called off: one that is given up stays as an array that is not ready, whose
    memory is its own, so late bytes land in nobody's region.
    """

    def __init__(self, host: str, device: Device):
        try:
            # In here, since not every build of jax has it.
            from jax.experimental import transfer

            start: Any = transfer.start_transfer_server
            self._server: Any = start(device.client, f"{host}:0", [f"{host}:0"])
        except (ImportError, AttributeError, RuntimeError, ValueError) as problem:
            what = f"no transfer server can be started ({problem})"
            raise TransportUnavailable("jax", what, "use a jax that has `jax.experimental.transfer`") from None
        self.address: str = self._server.address()
        self._device = device
        self._sharding = jax.sharding.SingleDeviceSharding(device)
        self._lock = threading.Lock()
        self._offers: dict[int, Array] = {}
        self._connections: dict[str, Any] = {}
        self._stuck: list[tuple[str, Array]] = []
        self.drained: deque[Array] = deque(maxlen=MOST_DRAINED)
        """Pulls of own offers that nobody took. One that was taken after all, unsaid, never comes: only a few stay."""

    def offer(self, number: int, found: NDArray[np.uint8]) -> None:
        """Put bytes up to be pulled once. They are kept, and must not change, until they are taken back."""
        array = jax.device_put(found, self._device)
        with self._lock:
            self._offers[number] = array
        self._server.await_pull(number, [array])

    def take_back(self, number: int, taken: bool) -> None:
        """Let go of what was offered. The server knows no way to forget an offer, so what nobody took is pulled by
        this process itself."""
        with self._lock:
            array = self._offers.pop(number)
        if not taken:
            self.drained.append(self.pull(self.address, number, array.nbytes))

    def pull(self, address: str, number: int, nbytes: int) -> Array:
        """`[nbytes]` uint8, not ready yet."""
        with self._lock:
            if address not in self._connections:
                self._connections[address] = self._server.connect(address)
            connection = self._connections[address]
        spec = jax.ShapeDtypeStruct((nbytes,), np.uint8, sharding=self._sharding)
        return connection.pull(number, [spec])[0]

    def forget(self, address: str) -> None:
        """The next pull from there connects anew."""
        with self._lock:
            self._connections.pop(address, None)

    def leave(self, address: str, array: Array) -> None:
        """Give a pull up: it counts as stuck until it is ready after all."""
        with self._lock:
            self._stuck.append((address, array))

    def stuck(self, address: str) -> int:
        """Pulls from there that were given up and have not come since."""
        with self._lock:
            self._stuck = [one for one in self._stuck if not one[1].is_ready()]
            return sum(whose == address for whose, _ in self._stuck)

    @property
    def offered(self) -> int:
        return len(self._offers)

    def close(self) -> None:
        with self._lock:
            self._offers.clear()
            self._connections.clear()
            self._stuck.clear()
            self.drained.clear()
            self._server = None


class JaxEndpoint(LaneEndpoint[Region]):
    """Shows regions of host memory to peers that know `secret`, and reads theirs, by `jax.experimental.transfer`.

    The owner copies what it is asked for into an array on `device` and offers that; the reader pulls it and copies it
    into its region. So nothing of the mechanism's ever touches a region, and what is late lands nowhere.

    Args:
        host: address to bind. Loopback unless another one is given.
        device: of this process, through which bytes go: the first unless another one is given.
        most_connections: from peers, at most; each may keep one offer of `MOST_OFFER_BYTES`.
        most_stuck: pulls from one peer that were given up and have not come since; a peer with more is not asked.
        handshake_s: seconds that either side has to prove itself.
        stall_s: seconds after which a peer that has begun a frame and does not go on is disconnected.
        idle_s: seconds after which a connection that nobody uses is closed by who opened it.
    """

    name = "jax"
    capabilities = Capabilities(write=False)

    def __init__(
        self,
        secret: Secret,
        *,
        host: str = "127.0.0.1",
        device: Device | None = None,
        most_connections: int = 64,
        most_stuck: int = 8,
        handshake_s: float = 5.0,
        stall_s: float = 30.0,
        idle_s: float = 300.0,
    ):
        """Raises `TransportUnavailable` if a server cannot be started there."""
        self._stores = _Stores(host, device or jax.local_devices()[0])
        try:
            listener = socket.create_server((host, 0), backlog=most_connections)
        except OSError as problem:
            self._stores.close()
            fix = "give an address of this machine"
            raise TransportUnavailable("jax", f"cannot listen on {host} ({problem.strerror})", fix) from None
        super().__init__(f"jax:{format_address(host, listener.getsockname()[1])}", idle_s)
        self._regions = Regions()
        self._most_stuck = most_stuck
        self._stall_s = stall_s
        self._dialer = Dialer(secret, None, handshake_s, KIND)
        self._clients: dict[str, OfferClient] = {}
        self._servers: dict[str, str] = {}
        """Of the peers that were pulled from: the addresses of their transfer servers."""
        self._sockets: dict[str, socket.socket] = {}
        """Of the connections to peers, from their first moment on."""
        self._sessions: dict[Session, None] = {}
        self._server = OfferServer(self._regions, self._stores.address, self._stores.offer, self._stores.take_back)
        self._door = Door(
            listener,
            secret,
            full=lambda: len(self._sessions) >= most_connections,
            admit=self._admit,
            turn_away=lambda: self._server.count_refused(1),
            handshake_s=handshake_s,
            kind=KIND,
        )

    def expose(
        self,
        buffer: NDArray[np.uint8],
        *,
        writable: bool = True,
        guard: Guard | None = None,
        layout: Mapping[str, Any] | None = None,
    ) -> Region:
        self._check_open()
        return self._regions.add(Region(self.address, buffer, writable, guard, layout))

    def withdraw(self, exposed: Exposed) -> None:
        if isinstance(exposed, Region):
            self._regions.withdraw(exposed)

    def stats(self) -> EndpointStats:
        """`refused` counts what peers were refused."""
        self._stats.refused = self._server.refused
        return self._stats

    def stuck(self, remote: RegionDescriptor) -> int:
        """Pulls from that peer that were given up and have not come since."""
        return self._stores.stuck(remote.address)

    def _own(self, local: Exposed) -> Region:
        if not isinstance(local, Region) or not self._regions.knows(local):
            raise AccessRefused("the local region is not one of this endpoint's")
        return local

    def _admit(self, sock: socket.socket) -> None:
        session = Session(wire_of(sock, self._stall_s), self._server, self._leave, "jax")
        with self._lock:
            self._sessions[session] = None
        session.start()

    def _leave(self, session: Session) -> None:
        self._server.gone(session)
        with self._lock:
            del self._sessions[session]

    def _end(self) -> None:
        self._door.close()
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.interrupt()
        for session in sessions:
            session.join()
        for address in list(self._clients):
            self._disconnect(address)
        self._regions.withdraw_all()
        self._stores.close()

    def _part(self, address: str) -> None:
        self._disconnect(address)

    def _hurry(self) -> None:
        for address in list(self._sockets):
            self._shut(address)

    def _shut(self, address: str) -> None:
        """Whoever blocks on the connection to a peer comes back."""
        sock = self._sockets.get(address)
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    # Below this line: on a lane's thread.

    def _perform(self, batch: Batch[Region]) -> None:
        address, pieces = batch.remote.address, cut(batch.spans, {}, GROUP_BYTES)
        if (stuck := self._stores.stuck(address)) > self._most_stuck:
            raise PeerLost(f"{stuck} pulls from the peer were given up and have not come")
        try:
            for start, stop in _groups(pieces.nbytes):
                part = pieces.part(start, stop)
                left = np.array([batch.indices[span] not in batch.errors for span in part.span.tolist()])
                if left.any():
                    self._group(batch, Pieces(part.span[left], part.target[left], part.source[left], part.nbytes[left]))
        except (Disconnected, Stalled, FrameError) as problem:
            self._disconnect(address)
            self._check(batch)  # its deadline, or our end, may be why
            raise PeerLost(f"the peer is gone, or talks nonsense ({problem})") from None
        except TransferError:
            self._disconnect(address)  # what may still come over it answers a question of before
            self._check(batch)
            raise
        for index, span in enumerate(batch.indices.tolist() if batch.checksums else ()):
            start = int(batch.spans.local[index])
            batch.digests[span] = digest_of(batch.local.buffer[start : start + int(batch.spans.nbytes[index])])
        self._check(batch)

    def _group(self, batch: Batch[Region], part: Pieces) -> None:
        self._check(batch)
        watch = self._watchdog.watch(batch.left_s, lambda: self._shut(batch.remote.address))
        try:
            client = self._client(batch.remote.address)
            offer = client.ask(batch.remote.key, batch.remote.epoch, part.source, part.nbytes)
        finally:
            self._watchdog.end(watch)
        for span, status in zip(part.span.tolist(), offer.statuses.tolist(), strict=True):
            if status != Status.OK:
                batch.errors.setdefault(int(batch.indices[span]), error_of(status))
        there = offer.statuses == Status.OK
        if there.any():
            self._pull(batch, client, offer, part.target[there], part.nbytes[there])

    def _pull(
        self,
        batch: Batch[Region],
        client: OfferClient,
        offer: Offer,
        targets: NDArray[np.int64],
        sizes: NDArray[np.int64],
    ) -> None:
        self._servers[batch.remote.address] = offer.address
        array = self._stores.pull(offer.address, offer.number, int(sizes.sum()))
        try:
            found = self._arrived(batch, client.wire, array)
        except TransferError:
            self._stores.leave(batch.remote.address, array)
            raise
        user = _Placing()
        status = batch.local.enter(user, batch.epoch, True)
        if status is not Status.OK:
            raise _local_problem(status)
        try:
            starts = np.cumsum(sizes) - sizes
            for target, start, size in zip(targets.tolist(), starts.tolist(), sizes.tolist(), strict=True):
                batch.local.buffer[target : target + size] = found[start : start + size]
        finally:
            batch.local.leave(user)
        status = batch.local.status(batch.epoch)
        if status is not Status.OK:
            raise _local_problem(status)
        client.acknowledge(offer)

    def _arrived(self, batch: Batch[Region], wire: Wire, array: Array) -> NDArray[np.uint8]:
        """The bytes of a pull, `[nbytes]`. Raises as soon as they will not come, or not in time."""
        began, pause_s = time.monotonic(), 0.0
        while not array.is_ready():
            self._check(batch)
            if select.select([wire.fileno()], [], [], 0)[0]:
                raise PeerLost("the peer is gone")
            if time.monotonic() - began > SPIN_S:
                pause_s = min(MOST_PAUSE_S, pause_s + 20e-6)
            time.sleep(pause_s)
        try:
            return np.asarray(array)
        except Exception as problem:  # jax has no name for what went wrong
            raise PeerLost(f"the pull failed ({problem})") from None

    def _check(self, batch: Batch[Region]) -> None:
        """Raises why it should not go on."""
        if self._closing.is_set():
            raise TransferCancelled("the endpoint jax was closed")
        if batch.pending.abandoned:
            raise TransferCancelled("given up by whoever asked for it")
        if batch.left_s <= 0:
            raise TransferTimeout("not there by its deadline")

    def _client(self, address: str) -> OfferClient:
        """The connection to a peer, made if there is none. Raises as `Dialer.dial` does."""
        found = self._clients.get(address)
        if found is None:
            wire = self._dialer.dial(address.removeprefix("jax:"), lambda sock: self._remember(address, sock))
            found = self._clients[address] = OfferClient(wire)
        return found

    def _remember(self, address: str, sock: socket.socket) -> None:
        with self._lock:
            self._sockets[address] = sock
        if self._closing.is_set():  # it came too late to be shut with the others
            self._shut(address)

    def _disconnect(self, address: str) -> None:
        client = self._clients.pop(address, None)
        with self._lock:
            self._sockets.pop(address, None)
        self._stores.forget(self._servers.pop(address, ""))
        if client is not None:
            client.wire.close()


class _Placing:
    """Who copies into a region what is here already: nobody waits for it long."""

    def interrupt(self) -> None:
        return


def _local_problem(status: Status) -> TransferError:
    if status is Status.WITHDRAWN:
        return AccessRefused("the local region was withdrawn")
    return StaleRegion("the local region changed hands; what arrived must not be used")


def _groups(nbytes: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """`(start, stop)` of pieces that are pulled in one go."""
    for start, stop in chunks(nbytes, GROUP_BYTES):
        for first in range(start, stop, MOST_GROUP_SPANS):
            yield first, min(stop, first + MOST_GROUP_SPANS)
