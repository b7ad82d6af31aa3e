"""One peer as the side that asks sees it: batches that wait, and the connections that take parts of them in turn."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mcjax.errors import TransferCancelled, TransferError, TransferTimeout
from mcjax.transfer.transports.tcp.batch import Batch, Part
from mcjax.transfer.transports.tcp.connection import Connection
from mcjax.transfer.transports.tcp.dial import Dialer

LOG = logging.getLogger(__name__)

BACK_OFF_S = 0.05, 2.0
"""Seconds from a first failure to connect to the next attempt, doubled each time; and the most."""


@dataclass(frozen=True)
class Limits:
    """Of the connections to one peer. `idle_s`: after so many seconds without work one is closed."""

    connections: int
    idle_s: float


class Peer:
    """`submit` hands a batch to a connection that is free, at once and on the caller's thread, or has it wait.

    Batches that wait take turns, a part each, so that a large one does not stand in the way of a small one.
    """

    def __init__(
        self,
        address: str,
        dialer: Dialer,
        limits: Limits,
        begun: Callable[[Batch], object],
        answered: Callable[[Batch], object],
    ):
        """`begun` and `answered` are told of every batch, of its end before whoever waits for it."""
        self.address = address
        self.dialer = dialer
        self.limits = limits
        self._begun = begun
        self._answered = answered
        self._lock = threading.Lock()
        self._waiting: deque[Batch] = deque()
        self._idle: list[Connection] = []
        self._connections: dict[Connection, bool] = {}
        """All that have not ended, and whether they are established."""
        self._failures = 0
        self._not_before = 0.0
        """By `time.monotonic()`: of the next attempt to connect."""
        self._closed = False

    def submit(self, batch: Batch) -> None:
        """Start a batch, or have it wait for a connection."""
        handed: list[tuple[Connection, Part]] = []
        with self._lock:
            self._begun(batch)
            if self._closed:
                batch.fail_waiting(_closed())
            while self._idle and batch.waiting:
                connection = self._idle.pop()
                handed.append((connection, batch.begin(connection)))
            if batch.waiting:
                self._waiting.append(batch)
                self._grow()
            over = batch.over
        for connection, part in handed:
            connection.hand(part)
        if over:
            self._answer([batch])

    def give_up(self, batch: Batch, error: TransferError) -> None:
        """What has not begun ends in `error`; what has is carried on."""
        with self._lock:
            was_over = batch.over
            batch.fail_waiting(error)
            over = batch.over and not was_over
        if over:
            self._answer([batch])

    def expire(self, batch: Batch) -> None:
        """The batch's deadline has passed: what has begun is cut off, and answered by who carries it."""
        error = TransferTimeout("not there by its deadline")
        with self._lock:
            begun = list(batch.begun)
            for part in begun:
                part.cut_off = error
        self.give_up(batch, error)
        for part in begun:
            part.carrier.interrupt(part, error)

    def take(self, connection: Connection) -> Part | None:
        """The next part for a connection that is free; None: it is idle now."""
        with self._lock:
            while self._waiting:
                batch = self._waiting.popleft()
                if not batch.waiting:
                    continue  # given up meanwhile
                part = batch.begin(connection)
                if batch.waiting:
                    self._waiting.append(batch)
                if self._waiting:
                    self._grow()
                return part
            self._idle.append(connection)
            return None

    def finish(self, part: Part) -> None:
        """A part has ended, well or not; nothing touches the local region on its behalf any more."""
        batch = part.batch
        with self._lock:
            batch.finish(part)
            if batch.waiting and batch not in self._waiting:
                self._waiting.append(batch)  # its last part may go now
            over = batch.over
        if over:
            self._answer([batch])

    def retire(self, connection: Connection) -> bool:
        """Whether an idle connection may end; not if somebody is handing it a part just now."""
        with self._lock:
            if connection not in self._idle:
                return False
            self._idle.remove(connection)
            return True

    def connected(self, connection: Connection) -> None:
        with self._lock:
            self._connections[connection] = True
            self._failures = 0

    def pause_s(self) -> float:
        """How long the next attempt to connect has to wait, by what became of those before."""
        return max(0.0, self._not_before - time.monotonic())

    def ended(self, connection: Connection, error: TransferError | None) -> None:
        """A connection is gone; `error`: it never was one. All that waits ends in that, unless there is another."""
        failed: list[Batch] = []
        with self._lock:
            self._connections.pop(connection, None)
            if error is not None:
                first_s, most_s = BACK_OFF_S
                self._not_before = time.monotonic() + min(first_s * 2 ** min(self._failures, 16), most_s)
                self._failures += 1
                if not any(self._connections.values()):
                    failed = [batch for batch in self._waiting if not batch.over]
                    self._waiting.clear()
                    for batch in failed:
                        batch.fail_waiting(error)
                    failed = [batch for batch in failed if batch.over]
            elif self._waiting:
                self._grow()
        self._answer(failed)

    def close(self) -> None:
        """All that is pending is answered, and every thread ends, before this returns."""
        with self._lock:
            self._closed = True
            waiting, connections = list(self._waiting), list(self._connections)
        for batch in waiting:
            self.give_up(batch, _closed())
        for connection in connections:
            connection.close(_closed())
        for connection in connections:
            connection.join()

    def _grow(self) -> None:
        """One more connection, if there may be one: somebody waits. With the lock held."""
        if len(self._connections) >= self.limits.connections or self._closed:
            return
        try:
            connection = Connection(self)
            connection.start()
        except (OSError, RuntimeError) as problem:  # no descriptors, or no threads: what waits has its deadline
            LOG.warning("no connection to %s: %s", self.address, problem)
            return
        self._connections[connection] = False  # it waits for the lock before it says a word of itself

    def _answer(self, batches: list[Batch]) -> None:
        for batch in batches:
            self._answered(batch)
            batch.answer()


def _closed() -> TransferError:
    return TransferCancelled("the endpoint is closed")
