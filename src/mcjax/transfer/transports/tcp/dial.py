"""How a peer is called: connect, TLS if there is any, and the handshake, all of it within a bounded time."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass

from mcjax.errors import AccessRefused, HandshakeRefused, PeerLost
from mcjax.transfer.transports.secret import Secret
from mcjax.transfer.transports.tcp.handshake import HELLO, KIND, VERDICT_BYTES, ClientHandshake
from mcjax.transfer.transports.tcp.tls import Tls
from mcjax.transfer.transports.tcp.wire import Wire, wire_of


def parse_address(address: str) -> tuple[str, int]:
    """`host:port`, the host in brackets if it has colons itself. Raises `AccessRefused`."""
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise AccessRefused(f"{address!r} is no address of a tcp endpoint (host:port)")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True)
class Dialer:
    """What every call of one endpoint has in common."""

    secret: Secret
    tls: Tls | None
    handshake_s: float
    kind: bytes = KIND

    def dial(self, address: str, watch: Callable[[socket.socket], object]) -> Wire:
        """A connection that has shaken hands. `watch` gets the socket early, so that somebody can shut it down.

        Raises `PeerLost`, `HandshakeRefused` and `AccessRefused` (no address).
        """
        deadline = time.monotonic() + self.handshake_s
        with contextlib.ExitStack() as undo:
            try:
                sock = _connect(parse_address(address), deadline, watch)
                undo.callback(sock.close)
                if self.tls is not None:
                    sock.settimeout(_left(deadline))
                    sock = self.tls.client.wrap_socket(sock, server_hostname=self.tls.server_name)
                    undo.callback(sock.close)
                    watch(sock)
                self._shake_hands(sock, deadline)
            except ssl.SSLError as problem:
                raise HandshakeRefused(f"no TLS with {address}: {problem.reason or problem}") from None
            except TimeoutError:
                raise PeerLost(f"{address} did not answer within {self.handshake_s:g} s") from None
            except OSError as problem:
                raise PeerLost(f"{address} cannot be reached: {problem.strerror or problem}") from None
            undo.pop_all()
            return wire_of(sock, None)

    def _shake_hands(self, sock: socket.socket, deadline: float) -> None:
        handshake = ClientHandshake(self.secret, self.kind)
        sock.sendall(handshake.hello)
        sock.sendall(handshake.prove(_receive(sock, HELLO.size, deadline)))
        handshake.conclude(_receive(sock, VERDICT_BYTES, deadline))


def _connect(where: tuple[str, int], deadline: float, watch: Callable[[socket.socket], object]) -> socket.socket:
    host, port = where
    error: OSError = OSError("no address")
    for family, kind, protocol, _name, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        watch(sock)
        try:
            sock.settimeout(_left(deadline))
            sock.connect(address)
        except OSError as problem:
            sock.close()
            error = problem
        else:
            return sock
    raise error


def _receive(sock: socket.socket, nbytes: int, deadline: float) -> bytes:
    received = b""
    while len(received) < nbytes:
        sock.settimeout(_left(deadline))
        more = sock.recv(nbytes - len(received))
        if not more:
            if received[:2] == b"\x15\x03":  # an alert of TLS
                raise HandshakeRefused("the peer speaks TLS, this endpoint does not")
            raise PeerLost("the peer closed the connection during the handshake")
        received += more
    return received


def _left(deadline: float) -> float:
    """Seconds; more than none, which would mean not to wait at all. Raises `TimeoutError`."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
