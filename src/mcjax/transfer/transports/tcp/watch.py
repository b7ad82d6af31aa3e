"""Who has waited long enough: one thread that tells of batches whose deadline has passed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from mcjax.transfer.transports.tcp.batch import Batch

LEAST_PAUSE_S = 0.005
"""Between two looks: all batches are looked at each time."""


class Watch:
    """`late(batch)` is called soon after the batch's deadline, by a thread that starts with the first batch. A batch
    that is removed before costs nothing."""

    def __init__(self, late: Callable[[Batch], object]):
        self._late = late
        self._batches: dict[Batch, None] = {}
        self._next = float("inf")
        """When the thread will look again, by `time.monotonic()`."""
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, batch: Batch) -> None:
        with self._changed:
            self._batches[batch] = None
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="mcjax-tcp-watch", daemon=True)
                self._thread.start()
            if batch.deadline < self._next:
                self._next = batch.deadline
                self._changed.notify()

    def remove(self, batch: Batch) -> None:
        with self._changed:
            self._batches.pop(batch, None)

    def close(self) -> None:
        """Ends the thread (from a callback of its own: when that returns)."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                if self._next > now and not self._closed:
                    self._changed.wait(min(self._next - now, threading.TIMEOUT_MAX))
                if self._closed:
                    return
                now = time.monotonic()
                late = [batch for batch in self._batches if batch.deadline <= now]
                for batch in late:
                    del self._batches[batch]
                first = min((batch.deadline for batch in self._batches), default=float("inf"))
                self._next = max(first, now + LEAST_PAUSE_S)
            for batch in late:
                self._late(batch)
