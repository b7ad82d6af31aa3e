"""The thread of an endpoint: waits for sockets and completion channels, and runs what other threads hand to it."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

LOG = logging.getLogger(__name__)
T = TypeVar("T")
Ready = Callable[[int], object]
"""Called with the events that a descriptor is ready for."""


class Loop:
    """Everything that an endpoint's connections know is touched by this one thread, so that nothing of it needs a lock.

    `tick()` runs after every round and says in how many seconds it wants to be run again at the latest.
    """

    def __init__(self, name: str, tick: Callable[[], float | None]):
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._calls: deque[Callable[[], object]] = deque()
        self._tick = tick
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], object]) -> None:
        """Have the thread call it, after what was handed to it before. Thread-safe."""
        self._calls.append(function)
        # Closed means stopped: then nothing is called any more.
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def start(self, function: Callable[[], T]) -> Future[T]:
        """Have the thread call it (at once, if this is the thread); what it returns or raises."""
        answer: Future[T] = Future()

        def perform() -> None:
            try:
                answer.set_result(function())
            except BaseException as problem:
                answer.set_exception(problem)

        if threading.current_thread() is self._thread:
            perform()
        else:
            self.call(perform)
        return answer

    def watch(self, descriptor: Any, events: int, ready: Ready) -> None:
        """On the thread only. Called again for the same descriptor, it changes what is waited for."""
        try:
            self._selector.modify(descriptor, events, ready)
        except KeyError:
            self._selector.register(descriptor, events, ready)

    def forget(self, descriptor: Any) -> None:
        """On the thread only; before the descriptor is closed."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(descriptor)

    def stop(self) -> None:
        """End the thread, after what was handed to it before."""
        self.call(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        timeout_s: float | None = None
        while not self._stopping:
            for key, events in self._selector.select(timeout_s):
                now = self._selector.get_map().get(key.fd)
                if now is None or now.data != key.data:
                    continue  # somebody before it in this round closed it, perhaps for good
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                else:
                    _guarded(key.data, events)
            for _ in range(len(self._calls)):
                _guarded(self._calls.popleft())
            timeout_s = _guarded(self._tick)
        self._selector.close()
        os.close(self._wake)


def _guarded(function: Callable[..., T], *arguments: Any) -> T | None:
    """One connection's mishap must not end the thread for all others."""
    try:
        return function(*arguments)
    except Exception:
        LOG.exception("rdma: a mishap on the endpoint's thread")
        return None
