"""One connection between two endpoints of a host: who is there, what it has exposed, and what is asked over it.

    dialler                                   listener
      hello, version, nonce        ------->
                                   <-------   hello, version, nonce, proof
      proof, probe, state file     ------->
                                   <-------   welcome, probe, state file

Both sides check that the other process is of the same user (the kernel says so) and knows the secret; after that, both
may ask. A `probe` is the address of some bytes that were told too: who can read them may read that process's memory,
and has the right process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import signal
import socket
import struct
import time
import weakref
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import (
    AccessRefused,
    HandshakeRefused,
    PeerLost,
    StaleRegion,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from mcjax.transfer.transports.secret import Secret
from mcjax.transfer.transports.shm import wire
from mcjax.transfer.transports.shm.attachment import Attachment
from mcjax.transfer.transports.shm.loop import Loop, Timer
from mcjax.transfer.transports.shm.memory import PTRACE_FIX, ForeignMemory, Mappings, address_of
from mcjax.transfer.transports.shm.state import StateFile, StateView
from mcjax.transfer.transports.shm.wire import Channel, Malformed, Message

LOG = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
"""That whoever connects has to prove itself."""

Answered = Callable[[Message | TransferError], object]


class Host:
    """What all links of an endpoint have in common."""

    def __init__(self, address: str, secret: Secret, loop: Loop):
        self.address = address
        self.secret = secret
        self.loop = loop
        self.state = StateFile()
        self.token = secrets.token_bytes(16)
        self.token_bytes = np.frombuffer(self.token, np.uint8)

    def probe(self) -> dict[str, Any]:
        return {"probe": address_of(self.token_bytes), "token": self.token.hex()}


class Link:
    """`asked` is told of each request of the peer's; `ended` when the link is no more. All on the loop's thread, but
    for `lost`, `attachments` and `gone`, which any thread may look at."""

    def __init__(
        self,
        host: Host,
        connection: socket.socket,
        peer_address: str | None,
        asked: Callable[[Link, Message], object],
        ended: Callable[[Link], object],
    ):
        """`peer_address`: of the endpoint that was called; None for one that calls. Raises `HandshakeRefused` for a
        process of another user, `PeerLost` for one that has gone again."""
        self.address = peer_address
        self.lost: TransferError | None = None
        self.attachments: dict[int, Attachment] = {}
        self.readable_memory = False
        self.peer_state: StateView
        self._host = host
        self._asked = asked
        self._ended = ended
        self.ready = False
        self._nonces = secrets.token_bytes(16), b""
        self._answers: dict[int, tuple[Answered, Timer]] = {}
        self._waiting: list[tuple[dict[str, Any], bytes]] = []
        self._numbers = 0
        self._mappings = Mappings()
        self._timer: Timer | None = None
        pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            raise HandshakeRefused("the peer's process is another user's")
        try:
            self._pidfd = _Process(pid)
        except OSError:
            raise PeerLost("the process is gone, or in another PID namespace") from None
        self.memory = ForeignMemory(pid)
        self._channel = Channel(connection)
        host.loop.watch(connection, self._on_ready)
        if peer_address is None:
            self._timer = host.loop.at(
                time.monotonic() + HANDSHAKE_S, lambda: self.close(TransferTimeout("no handshake"))
            )
        else:
            self._send({"hello": wire.VERSION, "nonce": self._nonces[0].hex()})

    # Requests

    def request(self, head: dict[str, Any], payload: bytes, deadline: float, answered: Answered) -> int:
        """Ask; `answered` is called once, with the answer or with what came instead of it."""
        self._numbers += 1
        number = self._numbers
        if self.lost is not None:
            answered(self.lost)
            return number
        late = TransferTimeout("not there by its deadline")
        timer = self._host.loop.at(deadline, lambda: self._answered(number, late))
        self._answers[number] = answered, timer
        head = {**head, "id": number}
        if self.ready:
            self._send(head, payload)
        else:
            self._waiting.append((head, payload))
        return number

    def tell(self, head: dict[str, Any]) -> None:
        """Something that needs no answer."""
        if self.ready:
            self._send(head)

    def reply(self, to: Message, head: dict[str, Any], payload: bytes = b"", fds: list[int] | None = None) -> None:
        self._send({**head, "to": to.head["id"]}, payload, fds)

    def refuse(self, to: Message, error: TransferError) -> None:
        self.reply(to, {"kind": type(error).__name__, "problem": error.problem})

    def attach(self, key: int, deadline: float, answered: Callable[[Attachment | TransferError], object]) -> None:
        """Learn of a region, or remember it."""
        if key in self.attachments and self.lost is None:
            answered(self.attachments[key])
            return

        def described(about: Message | TransferError) -> None:
            if isinstance(about, TransferError):
                answered(about)
                return
            try:
                mapped = self._map(about)
                self.attachments[key] = Attachment(self, about, mapped)
            except TransferError as problem:
                answered(problem)
                return
            answered(self.attachments[key])

        self.request({"do": "attach", "key": key}, b"", deadline, described)

    def _map(self, about: Message) -> NDArray[np.uint8] | None:
        if "offset" not in about.head:
            return None
        fd = about.take_fd()
        try:
            return self._mappings.attach(fd, about.number("offset"), about.number("nbytes"))
        finally:
            os.close(fd)

    # What comes

    def _on_ready(self, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._channel.flush()
                self._watch()
            messages = self._channel.receive()
        except OSError as problem:
            self.close(PeerLost(f"the connection broke: {problem}"))
            return
        for message in messages:
            if self.lost is not None:
                message.close_fds()
                continue
            try:
                self._take(message)
            except Malformed as problem:
                self.close(self._strange(problem))
            except TransferError as problem:
                self.close(problem)
            finally:
                message.close_fds()
        if self._channel.ended is not None and self.lost is None:
            ended = self._channel.ended
            self.close(self._strange(ended) if isinstance(ended, Malformed) else PeerLost("the peer has gone"))

    def _strange(self, problem: Malformed) -> TransferError:
        kind = PeerLost if self.ready else HandshakeRefused
        return kind(f"the peer does not keep to the protocol: {problem}")

    def _take(self, message: Message) -> None:
        if not self.ready:
            self._shake(message)
        elif "to" in message.head:
            self._answered(message.number("to"), message)
        else:
            self._asked(self, message)

    def _answered(self, number: int, answer: Message | TransferError) -> None:
        answered, timer = self._answers.pop(number, (None, None))
        if answered is None or timer is None:
            return  # it came too late
        timer.call = None
        try:
            if isinstance(answer, Message) and "problem" in answer.head:
                answer = error_of(answer.get("kind", str), answer.get("problem", str))
            answered(answer)
        except Malformed as problem:
            answered(self._strange(problem))  # whoever asked is told, too
            raise

    # The handshake

    def _proved(self, role: bytes) -> tuple[bytes, ...]:
        """What the secret is applied to: who proves it, to whom, in this very handshake."""
        dialler, listener = self._nonces if self.address is not None else self._nonces[::-1]
        address = self._host.address if self.address is None else self.address
        return b"mcjax-shm", role, str(wire.VERSION).encode(), address.encode(), dialler, listener

    def _proof(self, role: bytes) -> str:
        return self._host.secret.proof(*self._proved(role)).hex()

    def _check_proof(self, message: Message, role: bytes) -> None:
        if not self._host.secret.proves(_bytes(message, "proof"), *self._proved(role)):
            raise HandshakeRefused("the peer knows another secret")

    def _shake(self, message: Message) -> None:
        if "refused" in message.head:
            raise HandshakeRefused(message.get("refused", str)[:200])
        if "hello" in message.head and not self._nonces[1]:
            self._nonces = self._nonces[0], _bytes(message, "nonce")
            version = message.get("hello", int)
            if version != wire.VERSION:
                problem = f"the peer speaks version {version} of the protocol, this side version {wire.VERSION}"
                if self.address is None:
                    self._send({"refused": f"this peer speaks version {wire.VERSION} of the protocol, not {version}"})
                raise HandshakeRefused(problem)
            if self.address is None:
                self._send({"hello": version, "nonce": self._nonces[0].hex(), "proof": self._proof(b"listener")})
            else:
                self._check_proof(message, b"listener")
                about = {"proof": self._proof(b"dialler"), **self._host.probe()}
                self._send(about, fds=[self._host.state.for_reading()])
        elif self.address is None and self._nonces[1]:
            self._check_proof(message, b"dialler")
            self._meet(message)
            self._send({"welcome": True, **self._host.probe()}, fds=[self._host.state.for_reading()])
            self._begin()
        elif self.address is not None and self._nonces[1] and message.get("welcome", bool):
            self._meet(message)
            self._begin()
        else:
            raise Malformed("not what was expected in a handshake")

    def _meet(self, message: Message) -> None:
        """The other side has proved itself: what may be read of it?"""
        fd = message.take_fd()
        try:
            self.peer_state = StateView(fd)
        finally:
            os.close(fd)
        token = _bytes(message, "token")
        try:
            self.readable_memory = self.memory.peek(message.number("probe"), len(token)) == token
        except TransferError as problem:
            LOG.info("process %d: %s", self.memory.pid, problem.problem)

    def _begin(self) -> None:
        self.ready = True
        self._channel.largest_bytes = wire.LARGEST_BYTES
        if self._timer is not None:
            self._timer.call = None
        waiting, self._waiting = self._waiting, []
        for head, payload in waiting:
            if head["id"] in self._answers:
                self._send(head, payload)

    # The end

    @contextlib.contextmanager
    def reading(self) -> Generator[ForeignMemory]:
        """The peer's memory, for the body of a `with`. The process is the one that was met, not another one of the same
        number: it lived before, and lives after. Raises `AccessRefused`, `PeerLost`."""
        if not self.readable_memory:
            raise AccessRefused(f"this process may not read the peer's memory; {PTRACE_FIX}")
        if self.gone():
            raise PeerLost("the process is gone")
        yield self.memory
        if self.gone():
            raise PeerLost("the process is gone")

    def gone(self) -> bool:
        """Whether the process is no more, and its number perhaps another's."""
        try:
            signal.pidfd_send_signal(self._pidfd.fd, 0)
        except ProcessLookupError:
            return True
        return False

    def close(self, why: TransferError) -> None:
        """Every question is answered by `why`, and all that is held for the peer is let go."""
        if self.lost is not None:
            return
        self.lost = why.with_traceback(None)  # it is kept, and would keep the frames it was raised in
        if self._timer is not None:
            self._timer.call = None
        self._host.loop.forget(self._channel.socket)
        self._channel.close()
        self.attachments.clear()
        for number in list(self._answers):
            self._answered(number, why)
        self._ended(self)

    def _send(self, head: dict[str, Any], payload: bytes = b"", fds: list[int] | None = None) -> None:
        if self.lost is not None:
            for fd in fds or ():
                os.close(fd)
            return
        try:
            self._channel.send(head, payload, fds)
            self._watch()
        except OSError as problem:
            self.close(PeerLost(f"the connection broke: {problem}"))

    def _watch(self) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._channel.unsent else 0)
        self._host.loop.watch(self._channel.socket, self._on_ready, events)


class _Process:
    """A descriptor of a process, open for as long as anybody refers to it."""

    def __init__(self, pid: int):
        self.fd = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self.fd)


def _bytes(message: Message, name: str) -> bytes:
    try:
        return bytes.fromhex(message.get(name, str))
    except ValueError:
        raise Malformed(f"{name} is not hexadecimal") from None


_KINDS: dict[str, type[TransferError]] = {
    kind.__name__: kind
    for kind in (AccessRefused, HandshakeRefused, PeerLost, StaleRegion, TransferCancelled, TransferTimeout)
}


def error_of(kind: str, problem: str) -> TransferError:
    """As the peer named it; nothing but one of the errors that can be."""
    return _KINDS.get(kind, TransferError)(problem[:1000])
