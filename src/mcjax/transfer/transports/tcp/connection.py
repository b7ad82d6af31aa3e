"""One connection to a peer, for one part at a time, and the thread that carries it.

A small request is sent by whoever asks, on his own thread; the connection's thread, which waits for the socket, takes
the answer. Everything else is sent by that thread too.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from typing import TYPE_CHECKING

from mcjax.errors import PeerLost, TransferError
from mcjax.transfer.transports.tcp.batch import Part
from mcjax.transfer.transports.tcp.exchange import Exchange
from mcjax.transfer.transports.tcp.frames import FrameError
from mcjax.transfer.transports.tcp.payload import Withheld
from mcjax.transfer.transports.tcp.wire import Disconnected, PlainWire, Stalled, Wire

if TYPE_CHECKING:
    from mcjax.transfer.transports.tcp.peer import Peer


class Connection:
    """Dies with its first error: what a peer still sends to a broken one lands nowhere."""

    def __init__(self, peer: Peer):
        self._peer = peer
        self._turn = threading.Lock()
        """Held by whoever changes what is below."""
        self._part: Part | None = None
        self._handed = False
        """Whether `_part` was handed over, and waits for the thread."""
        self._exchange: Exchange | None = None
        self._unsent: memoryview | None = None
        """What is left to send of the part that was handed over; None for all of it."""
        self._why: TransferError | None = None
        """Why it was interrupted."""
        self._number = 0
        self._socket: socket.socket | None = None
        """While it is not a wire yet."""
        self._wire: Wire | None = None
        self._woken, self._waker = os.pipe()
        self._ended = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mcjax-tcp-ask", daemon=True)

    def start(self) -> None:
        """Raises `RuntimeError` if there can be no thread."""
        try:
            self._thread.start()
        except RuntimeError:
            os.close(self._woken)
            os.close(self._waker)
            raise

    def join(self) -> None:
        """From a callback of its own: it ends when that returns."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def hand(self, part: Part) -> None:
        """Begin a part on this idle connection, from the thread of whoever asks; never waits for the peer."""
        with self._turn:
            self._begin(part)
            self._handed = True
            self._unsent = self._send_small()
            if self._unsent is None or self._unsent:
                self._wake()
            # Else the answer wakes it.

    def interrupt(self, part: Part, why: TransferError) -> None:
        """If it is still at work on `part`, end the connection: the part is answered with `why` by its own thread."""
        with self._turn:
            if self._part is part:
                self._stop(why)

    def close(self, why: TransferError) -> None:
        """End it, whatever it does; `join` waits until it has."""
        self._closing.set()
        with self._turn:
            self._stop(why)
            self._wake()

    def _stop(self, why: TransferError) -> None:
        """With the turn held."""
        self._why = self._why or why
        if self._wire is not None:
            self._wire.interrupt()
        elif self._socket is not None:
            _shut_down(self._socket)

    def _wake(self) -> None:
        """With the turn held."""
        if not self._ended:
            os.write(self._waker, b"w")

    def _run(self) -> None:
        error: TransferError | None = None
        try:
            self._dial_and_work()
        except TransferError as problem:
            error = problem
        except Exception as problem:  # whatever went wrong must reach whoever waits
            error = TransferError(f"{type(problem).__name__}: {problem}")
        finally:
            with self._turn:
                self._ended = True
                self._wire = self._socket = None
                os.close(self._woken)
                os.close(self._waker)
            self._peer.ended(self, error)

    def _dial_and_work(self) -> None:
        """Raises why there is no connection."""
        if self._closing.wait(self._peer.pause_s()):
            return
        wire = self._peer.dialer.dial(self._peer.address, self._watch)
        try:
            with self._turn:
                self._wire, self._socket = wire, None
            self._peer.connected(self)
            self._work(wire)
        finally:
            wire.close()

    def _watch(self, sock: socket.socket) -> None:
        with self._turn:
            self._socket = sock
            if self._closing.is_set():
                _shut_down(sock)

    def _work(self, wire: Wire) -> None:
        poll = select.poll()
        poll.register(wire.fileno(), select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while not self._closing.is_set():
            part = self._peer.take(self)
            if part is not None:
                with self._turn:
                    self._begin(part)
            elif not self._wait(poll):
                return
            if not self._carry(wire):
                return

    def _begin(self, part: Part) -> None:
        """With the turn held."""
        self._part, self._exchange, self._unsent = part, None, None
        self._number += 1
        if part.cut_off is not None:
            self._stop(part.cut_off)

    def _send_small(self) -> memoryview | None:
        """What is left to send of a request that was small enough to be sent at once; None for all of any other. With
        the turn held."""
        part, wire = self._part, self._wire
        if part is None or not isinstance(wire, PlainWire):
            return None
        try:
            self._exchange = exchange = Exchange(part, self._number)
            small = exchange.small()
            return None if small is None else wire.send_now(small)
        except Exception:  # its own thread will meet it again, and have the part answered
            self._exchange = None
            return None

    def _wait(self, poll: select.poll) -> bool:
        """For a part to be handed over. False: the connection is to end."""
        while True:
            ready = poll.poll(self._peer.limits.idle_s * 1000)
            if any(descriptor == self._woken for descriptor, _event in ready):
                os.read(self._woken, 64)
            with self._turn:
                handed, self._handed = self._handed, False
            if handed:
                return True
            # Nothing to do, and yet awake: the peer has closed it, or it is closing, or was idle for too long.
            if self._peer.retire(self):
                return False

    def _carry(self, wire: Wire) -> bool:
        """Take the part to its end, and have it answered. Whether the connection is still good."""
        part = self._part
        assert part is not None
        problem: TransferError | None = None
        try:
            self._exchange_on(wire, part)
        except (Disconnected, Stalled) as gone:
            problem = PeerLost(f"the connection to {self._peer.address} ended ({gone})")
        except FrameError as nonsense:
            problem = PeerLost(f"{self._peer.address} sent what is no answer ({nonsense})")
        except Withheld:
            problem = part.local_problem()
        except Exception as other:  # whatever went wrong must reach whoever waits
            problem = TransferError(f"{type(other).__name__}: {other}")
        with self._turn:
            self._part, self._exchange, why = None, None, self._why
        if problem is not None:
            part.fail(why or problem)
            # Before the answer: nothing that is still in the kernel may leave after it.
            wire.close(abort=True)
        self._peer.finish(part)
        return problem is None and why is None

    def _exchange_on(self, wire: Wire, part: Part) -> None:
        exchange = self._exchange or Exchange(part, self._number)
        if exchange.nothing_left:
            return
        if self._exchange is None or self._unsent is None:
            exchange.send(wire)
        elif self._unsent:
            wire.send([self._unsent])
        exchange.receive(wire)


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # not connected, or gone
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
