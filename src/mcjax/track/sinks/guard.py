"""A sink behind a guard: in a thread of its own, so that a tracker that raises, hangs or is slow never hurts a run."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mcjax.track.sinks.base import RunInfo, Sink

FINISH_TIMEOUT_S = 60.0
QUEUED_CALLS = 256


class Guarded:
    """Runs a sink's calls, in order, in a daemon thread behind a bounded queue. It is a `Sink` itself; it never raises.

    A call that finds the queue full is dropped. After the first error the sink is left alone. `finish` waits up to
    `timeout_s` for everything to be done, then gives up. Whatever goes wrong is said once, through `warn`.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        timeout_s: float = FINISH_TIMEOUT_S,
        queued_calls: int = QUEUED_CALLS,
        warn: Callable[[str], None] | None = None,
    ):
        self._sink = sink
        self._name = type(sink).__name__
        self._timeout_s = timeout_s
        self._calls: queue.Queue[tuple[Callable[..., object], tuple[Any, ...]] | None] = queue.Queue(queued_calls)
        self._warn = warn or logging.getLogger("mcjax").warning
        self._lock = threading.Lock()
        self._warned = False
        self._broken = False
        self.dropped = 0
        """Calls that found the queue full."""
        self._thread = threading.Thread(target=self._work, name=f"sink-{self._name}", daemon=True)

    def start(self, info: RunInfo) -> None:
        self._thread.start()
        self._put(self._sink.start, info)

    def log(self, time_ns: int, metrics: Mapping[str, float]) -> None:
        self._put(self._sink.log, time_ns, dict(metrics))

    def finish(self, summary: Mapping[str, Any], directory: Path | None) -> None:
        if self._broken or not self._thread.is_alive():
            return
        deadline = time.monotonic() + self._timeout_s
        try:
            self._calls.put((self._sink.finish, (summary, directory)), timeout=self._timeout_s)
            self._calls.put(None, timeout=max(deadline - time.monotonic(), 0.001))
        except queue.Full:
            self._say(f"does not answer; its log is incomplete (given up after {self._timeout_s:g} s)")
            return
        self._thread.join(max(deadline - time.monotonic(), 0))
        if self._thread.is_alive():
            self._say(f"did not finish within {self._timeout_s:g} s; its log is incomplete")
        elif self.dropped:
            self._say(f"was too slow: {self.dropped} live points were dropped")

    def _put(self, call: Callable[..., object], *arguments: Any) -> None:
        if self._broken:
            return
        try:
            self._calls.put_nowait((call, arguments))
        except queue.Full:
            self.dropped += 1

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            if self._broken:
                continue
            call, arguments = item
            try:
                call(*arguments)
            except BaseException as error:  # a tracker may even call sys.exit
                self._broken = True
                self._say(f"failed in {getattr(call, '__name__', 'a call')} and is left alone from here: {error!r}")

    def _say(self, problem: str) -> None:
        with self._lock:
            first, self._warned = not self._warned, True
        if first:
            self._warn(f"tracker {self._name} {problem}; the run itself is not affected")
