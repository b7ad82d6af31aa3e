"""The control connection: messages of JSON over TCP, each with its length in front, without ever blocking.

It carries what is needed to reach memory (queue pair numbers, addresses, keys), never the memory itself.
"""

from __future__ import annotations

import json
import socket
from typing import Any, cast

Message = dict[str, Any]

_LENGTH_BYTES = 4
_STRANGER_BYTES = 4 << 10
_MOST_BYTES = 16 << 20
_MOST_UNSENT_BYTES = 64 << 20
_CLOSED = "the other side closed the connection"
_UNACKNOWLEDGED_MS = 10_000
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class BrokenWire(Exception):
    """The connection ended, or what came over it is no message. Says which."""


class Wire:
    """One end. Of a stranger only short messages are taken (`trust` ends that)."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
        for option, value in _KEEP_ALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self.socket = connection
        self._limit = _STRANGER_BYTES
        self._received = bytearray()
        self._unsent = bytearray()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def trust(self) -> None:
        self._limit = _MOST_BYTES

    def send(self, message: Message) -> None:
        """Queue a message and send what goes at once. Raises `BrokenWire`."""
        text = json.dumps(message, separators=(",", ":")).encode()
        self.send_bytes(len(text).to_bytes(_LENGTH_BYTES, "big") + text)

    def send_bytes(self, data: bytes) -> None:
        """The same, of what is no message. Raises `BrokenWire`."""
        if len(self._unsent) + len(data) > _MOST_UNSENT_BYTES:
            raise BrokenWire("the other side takes no messages")
        self._unsent += data
        self.flush()

    def flush(self) -> None:
        """Send what goes. Raises `BrokenWire`."""
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError as problem:
            raise BrokenWire(str(problem)) from None

    def take(self, nbytes: int) -> bytes | None:
        """The next `nbytes`, if they have come. Raises `BrokenWire` if they never will."""
        ended = self._fill()
        if len(self._received) < nbytes:
            if ended:
                raise BrokenWire(_CLOSED)
            return None
        taken = bytes(self._received[:nbytes])
        del self._received[:nbytes]
        return taken

    def receive(self) -> list[Message]:
        """Messages that are there. Raises `BrokenWire` at the end of the connection, unless messages came before it."""
        ended = self._fill()
        messages = self._split()
        if ended and not messages:
            raise BrokenWire(_CLOSED)
        return messages

    def _fill(self) -> bool:
        """Take what has come; whether the connection has ended."""
        try:
            while len(self._received) <= self._limit + _LENGTH_BYTES:
                data = self.socket.recv(1 << 16)
                if not data:
                    return True
                self._received += data
        except BlockingIOError:
            pass
        except OSError as problem:
            raise BrokenWire(str(problem)) from None
        return False

    def _split(self) -> list[Message]:
        messages: list[Message] = []
        while len(self._received) >= _LENGTH_BYTES:
            length = int.from_bytes(self._received[:_LENGTH_BYTES], "big")
            if length > self._limit:
                raise BrokenWire(f"a message of {length} bytes, where {self._limit} are allowed")
            end = _LENGTH_BYTES + length
            if len(self._received) < end:
                break
            messages.append(_parsed(bytes(self._received[_LENGTH_BYTES:end])))
            del self._received[:end]
        return messages

    def close(self) -> None:
        self.socket.close()


def _parsed(text: bytes) -> Message:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise BrokenWire("not a message") from None
    if not isinstance(value, dict):
        raise BrokenWire("not a message")
    return cast(Message, value)


def number(message: Message, name: str, most: int = (1 << 64) - 1) -> int:
    """A field that must be a whole number of 0 to `most`. Raises `BrokenWire`."""
    value = message.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise BrokenWire(f"{name} is not a number of 0 to {most}")
    return value


def text(message: Message, name: str) -> str:
    """Raises `BrokenWire` if the field is no text."""
    value = message.get(name)
    if not isinstance(value, str):
        raise BrokenWire(f"{name} is not a text")
    return value
