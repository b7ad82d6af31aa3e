"""One established connection: views of memory out, views of memory in, and a way to end it from another thread.

Plain connections block in the kernel, with the GIL released, and are never copied in Python. With TLS the same is done
through the SSL socket, which encrypts on the way.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

SMALL_BYTES = 16 << 10
"""Up to here, copying bytes together costs less than another call."""
TLS_PIECE_BYTES = 256 << 10
"""An SSL socket's time-out is for the whole of what it sends, whatever the progress."""
KEEPALIVE_S = 15, 5, 3
"""Seconds until a silent connection is probed, between probes, and probes (a number)."""
MORE: int = getattr(socket, "MSG_MORE", 0)
"""Linux's: without it, a short payload goes out in two packets."""
_TIMEVAL = struct.Struct("@ll")


class Disconnected(Exception):
    """The other side has closed the connection, or this one has interrupted it."""


class Stalled(Exception):
    """The other side has neither taken nor sent a byte for longer than it may."""


class Wire(ABC):
    """Used by one thread at a time; only `interrupt` may be called from any."""

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._ending = threading.Lock()

    @abstractmethod
    def send(self, views: Sequence[memoryview], more: bool = False) -> None:
        """All of them, in order. `more`: there is more to come at once. Raises `Disconnected` and `Stalled`."""

    @abstractmethod
    def receive(self, views: Sequence[memoryview], idle: bool = False) -> None:
        """Fill all of them, in order. `idle`: the first byte may take as long as it likes. Raises `Disconnected` and
        `Stalled`."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def interrupt(self) -> None:
        """Whoever sends or receives is disconnected at once; what was not sent yet never is."""
        with self._ending, contextlib.suppress(OSError):
            # Of the plain class: that of an SSL socket would turn it into a plain one under its user's hands.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self, abort: bool = False) -> None:
        """`abort`: what the kernel has not sent yet is thrown away, and the other side sees a reset."""
        with self._ending:
            if abort:
                with contextlib.suppress(OSError):
                    self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._socket.close()


class PlainWire(Wire):
    def send(self, views: Sequence[memoryview], more: bool = False) -> None:
        rest, flags = list(views), MORE if more else 0
        while rest:
            try:
                sent = self._socket.sendmsg(rest, (), flags)
            except BlockingIOError:
                raise Stalled from None
            except OSError as problem:
                raise Disconnected(str(problem)) from None
            rest = after(rest, sent)

    def send_now(self, view: memoryview) -> memoryview:
        """What can be sent without waiting. What is left of it. Raises `Disconnected`."""
        try:
            return view[self._socket.send(view, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return view
        except OSError as problem:
            raise Disconnected(str(problem)) from None

    def receive(self, views: Sequence[memoryview], idle: bool = False) -> None:
        rest = list(views)
        while rest:
            try:
                if len(rest) == 1:
                    received = self._socket.recv_into(rest[0], 0, socket.MSG_WAITALL)
                else:
                    received = self._socket.recvmsg_into(rest, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                if idle:
                    continue
                raise Stalled from None
            except OSError as problem:
                raise Disconnected(str(problem)) from None
            if not received:
                raise Disconnected("end of the stream")
            idle = False
            rest = after(rest, received)


class TlsWire(Wire):
    def __init__(self, sock: ssl.SSLSocket):
        super().__init__(sock)
        self._tls = sock

    def send(self, views: Sequence[memoryview], more: bool = False) -> None:
        if sum(map(len, views)) <= SMALL_BYTES:
            views = [memoryview(b"".join(views))]
        try:
            for view in views:
                for start in range(0, len(view), TLS_PIECE_BYTES):
                    self._tls.sendall(view[start : start + TLS_PIECE_BYTES])
        except TimeoutError:
            raise Stalled from None
        except (OSError, ValueError) as problem:
            raise Disconnected(str(problem)) from None

    def receive(self, views: Sequence[memoryview], idle: bool = False) -> None:
        rest = list(views)
        while rest:
            try:
                received = self._tls.recv_into(rest[0])
            except TimeoutError:
                if idle:
                    continue
                raise Stalled from None
            except (OSError, ValueError) as problem:
                raise Disconnected(str(problem)) from None
            if not received:
                raise Disconnected("end of the stream")
            idle = False
            rest = after(rest, received)


def after(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of the views after `done` bytes."""
    for index, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[index + 1 :]] if done else list(views[index:])
        done -= len(view)
    return []


def wire_of(sock: socket.socket, stall_s: float | None, dead_s: float = 30.0) -> Wire:
    """A connection that has shaken hands.

    Args:
        stall_s: seconds without a byte of progress that end a frame; None where somebody else watches.
        dead_s: seconds without an acknowledgement after which the kernel gives the peer up.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # Linux
        options = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
        for option, value in zip(options, KEEPALIVE_S, strict=True):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(dead_s * 1000))
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(stall_s)
        return TlsWire(sock)
    # Timeouts of the kernel's, not Python's: those would make the socket non-blocking, and MSG_WAITALL useless.
    sock.settimeout(None)
    if stall_s is not None:
        limit = _TIMEVAL.pack(int(stall_s), int(stall_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return PlainWire(sock)
