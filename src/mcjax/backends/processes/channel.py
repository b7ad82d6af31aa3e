"""The controller's end of the socket to one worker: orders go out, answers come in, and its end is noticed.

One thread a worker reads. Whoever sends does so from where it is, and never waits: what the socket does not take at
once (a worker that stands still reads nothing) is sent on by that thread.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mcjax.backends.processes.frames import FrameBroken, Frames, Message, encode

CHUNK_BYTES = 1 << 18
START_S = 30.0
"""How long a process may take to say its first word, at least."""
STEP = "step"
"""A message about an order that is not its answer yet."""

Answer = Callable[[Message | None], None]
"""Hears what came of an order, on the channel's thread; None: the worker is gone, and nobody knows."""


def _nothing(message: Message) -> None:
    pass


class Channel:
    """Orders are answered once each, whatever happens to the worker.

    `on_end(why)` is called from the channel's thread when the conversation is over, unless `last` or `close`
    asked for that: before
    those who wait for answers are told. `on_message` hears, on that thread, of messages that are no answers.
    """

    def __init__(
        self,
        name: str,
        ours: socket.socket,
        silence_s: float,
        on_end: Callable[[str], None],
        on_message: Callable[[Message], None] = _nothing,
    ):
        self.name = name
        self._socket = ours
        self._silence_s = silence_s
        self._on_end = on_end
        self._on_message = on_message
        self._lock = threading.Lock()
        self._orders = 0
        self._pending: dict[int, tuple[Answer, Answer]] = {}
        self._backlog = bytearray()
        self._ended = False
        self._closing = False
        self._expected = False
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._thread = threading.Thread(target=self._work, name=f"mcjax-channel-{name}", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether no order is taken any more."""
        return self._ended

    def send(self, kind: str, values: Mapping[str, Any] | None = None, buffers: Sequence[bytes] = ()) -> None:
        """Send an order that has no answer. One to a worker that is gone goes nowhere."""
        frame = encode(Message(kind, values or {}, buffers))
        with self._lock:
            self._write(frame)

    def ask(
        self,
        kind: str,
        values: Mapping[str, Any],
        answer: Answer,
        buffers: Sequence[bytes] = (),
        on_step: Answer | None = None,
    ) -> int:
        """Send an order; `answer` is called exactly once, on the channel's thread, or right here if the worker is gone.

        Returns the order's number. `on_step` hears of messages that tell of it meanwhile.
        """
        with self._lock:
            order = self._orders
            self._orders += 1
            if not self._ended:
                self._pending[order] = (answer, on_step or answer)
                self._write(encode(Message(kind, {**values, "order": order}, buffers)))
                return order
        answer(None)
        return order

    def last(self, kind: str) -> None:
        """`send`, after which the worker's end is what was asked for: `on_end` does not hear of it."""
        self._expected = True
        self.send(kind)

    def close(self, patience_s: float = 5.0) -> None:
        """End the conversation; orders without an answer get None. Harmless when repeated."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join(patience_s)

    def _write(self, frame: bytes) -> None:
        """With the lock held."""
        if self._ended:
            return
        sent = 0
        if not self._backlog:
            with contextlib.suppress(OSError):  # what is wrong with the socket, its reader finds out
                sent = self._socket.send(frame, socket.MSG_DONTWAIT)
        if sent < len(frame):
            self._backlog += memoryview(frame)[sent:]
            with contextlib.suppress(OSError):
                self._wake.send(b"\0")

    # On the channel's thread

    def _work(self) -> None:
        try:
            why = self._converse()
        except Exception as problem:  # an answer that could not be understood counts as the end of who gave it
            why = f"its answer could not be used ({type(problem).__name__}: {problem})"
        with self._lock:
            self._ended = True
            pending, self._pending = self._pending, {}
            self._backlog.clear()
        if not (self._closing or self._expected):
            self._on_end(why)
        for answer, _ in pending.values():
            answer(None)
        for end in (self._socket, self._wake, self._woken):
            end.close()

    def _converse(self) -> str:
        """Read and answer until the end. Returns why that was."""
        frames, poll, silence_s = Frames(), select.poll(), max(self._silence_s, START_S)
        poll.register(self._woken, select.POLLIN)
        heard_s = time.monotonic()
        while not self._closing:
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._backlog else 0))
            left_s = max(0.0, heard_s + silence_s - time.monotonic())
            for descriptor, what in poll.poll(left_s * 1000 + 1):
                if descriptor == self._woken.fileno():
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(CHUNK_BYTES)
                    continue
                if what & select.POLLOUT:
                    self._send_on()
                if not what & ~select.POLLOUT:
                    continue
                try:
                    piece = self._socket.recv(CHUNK_BYTES, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    continue
                except OSError as problem:
                    return f"its process is gone ({problem.strerror})"
                if not piece:
                    return "its process is gone"
                heard_s, silence_s = time.monotonic(), self._silence_s
                try:
                    for message in frames.feed(piece):
                        self._take(message)
                except FrameBroken as problem:
                    return f"it sent no message ({problem})"
            # Looked at only after what had arrived was read: if we stood still ourselves, nobody else was silent.
            if time.monotonic() - heard_s > silence_s and not self._readable():
                return f"it said nothing for {silence_s:g} s"
        return ""

    def _readable(self) -> bool:
        return bool(select.select([self._socket], [], [], 0)[0])

    def _send_on(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            sent = self._socket.send(self._backlog, socket.MSG_DONTWAIT)
            del self._backlog[:sent]

    def _take(self, message: Message) -> None:
        order = message.values.get("order")
        if order is None:
            self._on_message(message)
            return
        with self._lock:
            final = message.kind != STEP
            found = self._pending.pop(order, None) if final else self._pending.get(order)
        if found is not None:
            found[0 if final else 1](message)
