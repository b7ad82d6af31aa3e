"""Who may talk: a hello each, and a proof each that its sender knows the secret. Without a socket: what has to be sent
and what was received are bytes.

    client -> server   hello   magic, kind, version, nonce
    server -> client   hello   the same of the server's
    client -> server   proof   HMAC-SHA256(secret, "client", both hellos)
    server -> client   verdict one byte, and HMAC-SHA256(secret, "server", that byte, both hellos)

Roles are in the proofs, so neither can be sent back to whom it came from; fresh nonces of both sides are, so none is
good twice. Only who has proved itself is given a proof by the server.
"""

from __future__ import annotations

import secrets
import struct
from enum import IntEnum

from mcjax.errors import HandshakeRefused, PeerLost
from mcjax.transfer.transports.secret import Secret

VERSION = 1
HELLO = struct.Struct("<8s8sI4x32s")
"""Magic, kind of endpoint, version, nonce."""
MAGIC = b"\x8dmcjax\r\n"
KIND = b"tcp"
NONCE_BYTES = 32
PROOF_BYTES = 32
VERDICT_BYTES = 1 + PROOF_BYTES
_LABEL = b"mcjax tcp handshake"


class Verdict(IntEnum):
    WELCOME = 0
    WRONG_SECRET = 1
    FULL = 2


def hello(kind: bytes = KIND) -> bytes:
    return HELLO.pack(MAGIC, kind, VERSION, secrets.token_bytes(NONCE_BYTES))


def check_hello(raw: bytes, wanted: bytes = KIND) -> None:
    """Raises `HandshakeRefused` for a hello of another kind than `wanted`; says what it is."""
    magic, kind, version, _nonce = HELLO.unpack(raw)
    if magic != MAGIC:
        # A TLS record begins with its type (20 to 23) and version 3.
        tls = "; it seems to speak TLS" if 20 <= raw[0] <= 23 and raw[1] == 3 else ""
        raise HandshakeRefused(f"the peer is no endpoint of mcjax{tls}")
    if kind.rstrip(b"\0") != wanted:
        name = kind.rstrip(b"\0").decode("ascii", "replace")
        raise HandshakeRefused(f"the peer is an endpoint of another kind, {name!r}")
    if version != VERSION:
        raise HandshakeRefused(f"the peer speaks version {version} of the protocol, this endpoint version {VERSION}")


class ServerHandshake:
    """The side that was called. `wanted`: how many bytes it has to be fed with next; none when it is over."""

    def __init__(self, secret: Secret, kind: bytes = KIND):
        self.wanted = HELLO.size
        self._secret = secret
        self._kind = kind
        self._received = b""
        self._hellos: tuple[bytes, bytes] | None = None

    def feed(self, received: bytes, full: bool = False) -> tuple[bytes, HandshakeRefused | None]:
        """At most `wanted` bytes came in: what to send, and why the peer has to be let go after that, if it has.

        `full`: there is no room for this peer, whoever it is. It is told so if it knows the secret.
        """
        self._received += received
        self.wanted -= len(received)
        if self.wanted:
            return b"", None
        whole, self._received = self._received, b""
        if self._hellos is None:
            own = hello(self._kind)
            try:
                check_hello(whole, self._kind)
            except HandshakeRefused as problem:
                return own, problem  # so that the other side can say what is wrong, too
            self._hellos = whole, own
            self.wanted = PROOF_BYTES
            return own, None
        if not self._secret.proves(whole, _LABEL, b"client", *self._hellos):
            problem = HandshakeRefused("the peer does not know the secret")
            return bytes([Verdict.WRONG_SECRET]) + bytes(PROOF_BYTES), problem
        verdict = bytes([Verdict.FULL if full else Verdict.WELCOME])
        problem = HandshakeRefused("there is no room for another connection") if full else None
        return verdict + self._secret.proof(_LABEL, b"server", verdict, *self._hellos), problem


class ClientHandshake:
    """The side that calls: send `hello`, feed the server's, send what that gives, feed the verdict."""

    def __init__(self, secret: Secret, kind: bytes = KIND):
        self.hello = hello(kind)
        self._secret = secret
        self._kind = kind
        self._hellos = self.hello, b""

    def prove(self, server_hello: bytes) -> bytes:
        """The proof. Raises `HandshakeRefused` if the server is something else."""
        check_hello(server_hello, self._kind)
        self._hellos = self.hello, server_hello
        return self._secret.proof(_LABEL, b"client", *self._hellos)

    def conclude(self, verdict: bytes) -> None:
        """Raises `HandshakeRefused`, or `PeerLost` where the peer has no room now."""
        if verdict[0] == Verdict.WRONG_SECRET:
            raise HandshakeRefused("the peer has another secret")
        if not self._secret.proves(verdict[1:], _LABEL, b"server", verdict[:1], *self._hellos):
            raise HandshakeRefused("the peer does not know the secret")
        if verdict[0] == Verdict.FULL:
            raise PeerLost("the peer has no room for another connection")
        if verdict[0] != Verdict.WELCOME:
            raise HandshakeRefused(f"the peer's verdict is {verdict[0]}")
