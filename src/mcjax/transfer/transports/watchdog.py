"""Deadlines of batches whose mechanism has none: one thread that calls back when they have passed."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable


class Watchdog:
    """Calls `late` of each watch that nobody ended in time. The thread starts with the first watch.

    Callbacks run on the watchdog's thread, must not block, and must not raise.
    """

    def __init__(self, name: str):
        self._name = name
        self._wake = threading.Condition()
        self._due: list[tuple[float, int]] = []
        self._late: dict[int, Callable[[], object]] = {}
        self._next = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, seconds: float, late: Callable[[], object]) -> int:
        """Have `late` called in so many seconds; returns the watch's number. Raises `RuntimeError` after `close`."""
        with self._wake:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            self._next += 1
            self._late[self._next] = late
            entry = (time.monotonic() + max(0.0, seconds), self._next)
            heapq.heappush(self._due, entry)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            elif self._due[0] == entry:
                self._wake.notify()
            return self._next

    def end(self, number: int) -> None:
        """It is there: nothing is called. Harmless when it is too late."""
        with self._wake:
            self._late.pop(number, None)
            # An ended watch stays in the heap until it is due, unless most of the heap is such.
            if len(self._due) > 64 and len(self._due) > 4 * len(self._late):
                self._due = [entry for entry in self._due if entry[1] in self._late]
                heapq.heapify(self._due)

    def close(self) -> None:
        """End the thread; what is still watched is not called."""
        with self._wake:
            self._closed = True
            self._late.clear()
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._wake:
                if self._closed:
                    return
                left_s = self._due[0][0] - time.monotonic() if self._due else None
                if left_s is None or left_s > 0:
                    self._wake.wait(left_s)
                    continue
                late = self._late.pop(heapq.heappop(self._due)[1], None)
            if late is not None:
                late()
