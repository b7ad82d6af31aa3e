"""Messages over a Unix socket that keeps their borders: a JSON head, bytes, and descriptors of open files.

A message is one or more records: a flag (is it the last?), then its part. The first part begins with the length of the
head. What a peer sends is checked here for form, and by whoever reads it for what it says.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Any, TypeVar

VERSION = 1
"""Peers of another one are refused."""

RECORD_BYTES = 32 << 10
LARGEST_BYTES = 64 << 20
"""Of a message, and of what waits for a peer that does not read."""
MOST_DESCRIPTORS = 2

T = TypeVar("T")


class Malformed(Exception):
    """A peer that does not keep to the form: the connection is given up."""


@dataclass(slots=True)
class Message:
    head: dict[str, Any]
    payload: bytes = b""
    fds: list[int] = field(default_factory=list[int])

    def get(self, name: str, kind: type[T]) -> T:
        """A field of the head, of exactly that type. Raises `Malformed`."""
        value = self.head.get(name)
        if type(value) is not kind:
            raise Malformed(f"{name} is {type(value).__name__}, not {kind.__name__}")
        return value

    def number(self, name: str) -> int:
        """A field that is a number of at most 64 bits, not negative."""
        value = self.get(name, int)
        if not 0 <= value < 1 << 64:
            raise Malformed(f"{name} is out of range")
        return value

    def take_fd(self) -> int:
        if not self.fds:
            raise Malformed("a descriptor is missing")
        return self.fds.pop(0)

    def close_fds(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()


class Channel:
    """One connection, never waited for. `largest_bytes`: of a message that comes; little until the peer is known."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self.largest_bytes = 4096
        self.ended: Exception | None = None
        self._outgoing: deque[tuple[bytes, list[int]]] = deque()
        self.unsent_bytes = 0
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._fds: list[int] = []
        connection.setblocking(False)

    @property
    def unsent(self) -> bool:
        return bool(self._outgoing)

    def send(self, head: dict[str, Any], payload: bytes = b"", fds: list[int] | None = None) -> None:
        """Queue a message and send what goes. The descriptors are closed when they have been sent. Raises `OSError`
        if the peer has gone or does not read."""
        text = json.dumps(head).encode()
        whole = struct.pack("<I", len(text)) + text + payload
        for start in range(0, len(whole), RECORD_BYTES):
            last = start + RECORD_BYTES >= len(whole)
            record = bytes([last]) + whole[start : start + RECORD_BYTES]
            self._outgoing.append((record, (fds or []) if start == 0 else []))
            self.unsent_bytes += len(record)
        if self.unsent_bytes > LARGEST_BYTES:
            raise BrokenPipeError("the peer does not read")
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as it goes. Raises `OSError`."""
        while self._outgoing:
            record, fds = self._outgoing[0]
            about = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                self.socket.sendmsg([record], about, socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return
            self._outgoing.popleft()
            self.unsent_bytes -= len(record)
            for fd in fds:
                os.close(fd)

    def receive(self) -> list[Message]:
        """Messages that are complete, in order. When no more can come, `ended` says why."""
        messages: list[Message] = []
        for _ in range(64):  # then others have their turn
            try:
                message = self._record()
            except (BlockingIOError, InterruptedError):
                break
            except (EOFError, Malformed, OSError) as problem:
                self.ended = problem.with_traceback(None)  # or the frames there would keep what is to be let go
                break
            if message is not None:
                messages.append(message)
        return messages

    def _record(self) -> Message | None:
        space = socket.CMSG_SPACE(MOST_DESCRIPTORS * array.array("i").itemsize)
        record, about, flags, _ = self.socket.recvmsg(RECORD_BYTES + 1, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in about:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._fds += fds
        if not record:
            raise EOFError
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or record[0] > 1 or len(self._fds) > MOST_DESCRIPTORS:
            raise Malformed("not a record")
        self._parts.append(record[1:])
        self._parts_bytes += len(record) - 1
        if self._parts_bytes > self.largest_bytes:
            raise Malformed("a message that is too long")
        if not record[0]:
            return None
        whole, fds = b"".join(self._parts), self._fds
        self._parts, self._parts_bytes, self._fds = [], 0, []
        return _parse(whole, fds)

    def close(self) -> None:
        for _, fds in self._outgoing:
            for fd in fds:
                os.close(fd)
        for fd in self._fds:
            os.close(fd)
        self._outgoing.clear()
        self._fds = []
        self.socket.close()


def _parse(whole: bytes, fds: list[int]) -> Message:
    message = Message({}, b"", fds)
    try:
        (length,) = struct.unpack_from("<I", whole)
        if length > len(whole) - 4:
            raise ValueError("the head is cut off")
        head = json.loads(whole[4 : 4 + length])
        if not isinstance(head, dict):
            raise ValueError("the head is no object")
    except (ValueError, struct.error, RecursionError) as problem:
        message.close_fds()
        raise Malformed(str(problem)) from None
    message.head = head
    message.payload = whole[4 + length :]
    return message
