"""The first words over a control connection: the handshake that endpoints share, after which messages follow."""

from __future__ import annotations

from mcjax.errors import HandshakeRefused
from mcjax.transfer.transports.rdma.wire import Wire
from mcjax.transfer.transports.secret import Secret
from mcjax.transfer.transports.tcp.handshake import HELLO, VERDICT_BYTES, ClientHandshake, ServerHandshake

KIND = b"rdma"


class Calling:
    """The side that called. When `done`, the other one has proved that it knows the secret."""

    def __init__(self, secret: Secret):
        self.done = False
        self._handshake = ClientHandshake(secret, KIND)
        self._wanted = HELLO.size

    def begin(self, wire: Wire) -> None:
        wire.send_bytes(self._handshake.hello)

    def go_on(self, wire: Wire) -> None:
        """With what has come. Raises `HandshakeRefused`, `PeerLost`, `BrokenWire`."""
        while not self.done and (received := wire.take(self._wanted)) is not None:
            if self._wanted == HELLO.size:
                wire.send_bytes(self._handshake.prove(received))
                self._wanted = VERDICT_BYTES
            else:
                self._handshake.conclude(received)
                self.done = True


class Called:
    """The side that was called."""

    def __init__(self, secret: Secret):
        self._handshake = ServerHandshake(secret, KIND)
        self._refused: HandshakeRefused | None = None

    @property
    def done(self) -> bool:
        return not self._handshake.wanted and self._refused is None

    def go_on(self, wire: Wire) -> None:
        """With what has come. Raises `HandshakeRefused`, after the other side was told."""
        while self._handshake.wanted and (received := wire.take(self._handshake.wanted)) is not None:
            answer, self._refused = self._handshake.feed(received)
            wire.send_bytes(answer)
            if self._refused is not None:
                raise self._refused
