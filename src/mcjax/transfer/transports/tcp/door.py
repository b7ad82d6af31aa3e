"""Who comes in: a listening socket, and one thread that shakes hands with all who called, none of whom can hold it up.

Those who have not proved themselves cost a socket and a few bytes each, for a bounded time and in a bounded number; a
thread is given only to those who have.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mcjax.errors import HandshakeRefused
from mcjax.transfer.transports.secret import Secret
from mcjax.transfer.transports.tcp.handshake import KIND, ServerHandshake

LOG = logging.getLogger(__name__)

MOST_STRANGERS = 128
"""Connections that are shaking hands. One more, and the eldest has to go."""
TLS_ALERT = bytes([21, 3, 3, 0, 2, 2, 70])
"""That the protocol's version is none, fatally: for one who does not speak TLS, whom OpenSSL would tell nothing."""
UNREAD_BYTES = 64 << 10
BREATH_S = 0.1
"""Pause after the system could not accept (no descriptors left, say)."""


@dataclass(eq=False)
class Stranger:
    """A connection whose peer has not proved itself yet."""

    sock: socket.socket
    deadline: float
    handshake: ServerHandshake
    encrypted: bool = field(default=True)
    """Whether TLS (where there is any) is set up."""


class Door:
    """Accepts connections on `listener` (which it owns), and gives those that have shaken hands to `admit`.

    Args:
        full: whether there is no room for another one, as of now.
        admit: gets a socket in blocking mode; called by the door's thread.
        turn_away: told of each one that was refused.
        handshake_s: what a stranger has to prove himself, seconds.
        kind: of endpoint, which both sides have to be.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: Secret,
        *,
        full: Callable[[], bool],
        admit: Callable[[socket.socket], object],
        turn_away: Callable[[], object],
        handshake_s: float,
        tls: ssl.SSLContext | None = None,
        kind: bytes = KIND,
    ):
        self._listener = listener
        self._secret = secret
        self._full = full
        self._admit = admit
        self._turn_away = turn_away
        self._handshake_s = handshake_s
        self._tls = tls
        self._kind = kind
        self._strangers: dict[Stranger, None] = {}
        """The eldest first."""
        self._closing, self._close_signal = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._closing, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=f"mcjax-{kind.decode()}-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nobody is let in any more; returns when the thread has ended."""
        self._close_signal.send(b"x")
        self._thread.join()
        self._close_signal.close()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            for stranger in list(self._strangers):
                self._drop(stranger)
            self._selector.close()
            self._listener.close()
            self._closing.close()

    def _turn(self) -> bool:
        eldest = next(iter(self._strangers), None)
        patience_s = None if eldest is None else max(0.0, eldest.deadline - time.monotonic())
        for key, _events in self._selector.select(patience_s):
            if key.fileobj is self._closing:
                return False
            if key.fileobj is self._listener:
                self._accept()
            elif key.data in self._strangers:
                self._go_on(key.data)
        now = time.monotonic()
        for stranger in [stranger for stranger in self._strangers if stranger.deadline <= now]:
            self._refuse(stranger, "it did not prove itself in time")
        return True

    def _accept(self) -> None:
        try:
            sock, _address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as problem:
            LOG.warning("cannot accept a connection: %s", problem)
            time.sleep(BREATH_S)
            return
        sock.setblocking(False)
        if self._tls is not None:
            try:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            except OSError:  # gone already
                sock.close()
                return
        if len(self._strangers) >= MOST_STRANGERS:
            self._refuse(next(iter(self._strangers)), "others wait, and it has waited longest")
        deadline = time.monotonic() + self._handshake_s
        stranger = Stranger(sock, deadline, ServerHandshake(self._secret, self._kind), encrypted=self._tls is None)
        self._strangers[stranger] = None
        self._selector.register(sock, selectors.EVENT_READ, stranger)

    def _go_on(self, stranger: Stranger) -> None:
        try:
            if not stranger.encrypted:
                assert isinstance(stranger.sock, ssl.SSLSocket)
                stranger.sock.do_handshake()
                stranger.encrypted = True
            while wanted := stranger.handshake.wanted:
                received = stranger.sock.recv(wanted)
                if not received:
                    self._refuse(stranger, "it went away")
                    return
                answer, problem = stranger.handshake.feed(received, self._full())
                # A few bytes into an empty buffer: a peer for whom they do not fit is none.
                if answer and stranger.sock.send(answer) != len(answer):
                    problem = problem or HandshakeRefused("it does not listen")
                if problem is not None:
                    self._refuse(stranger, problem.problem)
                    return
        except (BlockingIOError, ssl.SSLWantReadError):
            return  # the rest will come
        except (OSError, ValueError) as problem:
            if isinstance(problem, ssl.SSLError) and problem.reason == "WRONG_VERSION_NUMBER":
                with contextlib.suppress(OSError):
                    socket.socket.send(stranger.sock, TLS_ALERT)
            self._refuse(stranger, str(problem))
            return
        self._selector.unregister(stranger.sock)
        del self._strangers[stranger]
        stranger.sock.setblocking(True)
        self._admit(stranger.sock)

    def _refuse(self, stranger: Stranger, why: str) -> None:
        LOG.info("a connection is refused: %s", why)
        self._turn_away()
        self._drop(stranger)

    def _drop(self, stranger: Stranger) -> None:
        self._selector.unregister(stranger.sock)
        del self._strangers[stranger]
        # Of the plain class, whatever it is. With bytes unread, the close would be a reset, which can overtake what the
        # stranger was told.
        with contextlib.suppress(OSError):
            socket.socket.recv(stranger.sock, UNREAD_BYTES)
        stranger.sock.close()
