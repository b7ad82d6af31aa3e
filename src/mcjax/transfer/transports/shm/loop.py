"""The thread that an endpoint's sockets and deadlines are on. Nothing on it ever waits for a peer."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

LOG = logging.getLogger(__name__)

Call = Callable[[], object]
Ready = Callable[[int], object]
"""Is told `selectors.EVENT_READ | EVENT_WRITE`, as it is."""


@dataclass(order=True, slots=True)
class Timer:
    """Set `call` to None to have nothing happen."""

    at: float
    number: int
    call: Call | None = field(compare=False)


class Loop:
    """Starts with the first `post`. `close` ends it, after what was posted before."""

    def __init__(self, name: str):
        self._name = name
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._calls: deque[Call] = deque()
        self._timers: list[Timer] = []
        self._numbers = itertools.count()
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._closed = False

    def post(self, call: Call) -> bool:
        """Have it called on the loop's thread, soon. False if the loop is closed: then it never is."""
        with self._lock:
            if self._closed:
                return False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._calls.append(call)
            os.eventfd_write(self._wake, 1)
            return True

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()
        self._selector.close()
        os.close(self._wake)

    # On the loop's thread only:

    def at(self, when: float, call: Call) -> Timer:
        """Have it called when `time.monotonic()` is at `when`."""
        timer = Timer(when, next(self._numbers), call)
        heapq.heappush(self._timers, timer)
        return timer

    def watch(self, connection: socket.socket, ready: Ready, events: int = selectors.EVENT_READ) -> None:
        """Say what to look out for from now on."""
        try:
            self._selector.modify(connection, events, ready)
        except KeyError:
            self._selector.register(connection, events, ready)

    def forget(self, connection: socket.socket) -> None:
        try:
            self._selector.unregister(connection)
        except (KeyError, ValueError):
            return

    def _run(self) -> None:
        while not self._finished():
            self._look()
            while self._calls:
                _guarded(self._calls.popleft())
            while self._timers and self._timers[0].at <= time.monotonic():
                call = heapq.heappop(self._timers).call
                if call is not None:
                    _guarded(call)

    def _finished(self) -> bool:
        with self._lock:
            return self._closed and not self._calls

    def _look(self) -> None:
        """Wait for something to happen, and see to it."""
        patience = max(0.0, self._timers[0].at - time.monotonic()) if self._timers else None
        for key, events in self._selector.select(patience):
            if key.data is None:
                os.eventfd_read(self._wake)
            else:
                _guarded(partial(key.data, events))


def _guarded(call: Call) -> None:
    """Whatever goes wrong for one connection, the others go on."""
    try:
        call()
    except Exception:
        LOG.exception("on the thread of an endpoint")
