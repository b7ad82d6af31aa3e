"""A sink behind a guard: in a thread of its own, so that a tracker that raises, hangs or is slow never hurts a run."""

from __future__ import annotations

import copy
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mcjax.track.sinks.base import RunInfo, Sink

FINISH_TIMEOUT_S = 60.0
QUEUED_POINTS = 256
POINTS_SHARE = 0.5
"""Of the time for finishing, what live points that still wait may take: the summary matters more than they do."""

LOOK_S = 0.2
"""How often waiting looks up: where a run plays on a thread of its own, Ctrl-C reaches it only between two waits."""


class Guarded:
    """Runs a sink's calls, in order, in a daemon thread behind a bounded queue. It is a `Sink` itself; it never raises.

    A live point that finds the queue full is dropped. After the first error the sink is left alone. `finish` waits up
    to `timeout_s` for everything to be done, then gives up. Whatever goes wrong is said once, through `warn`. What the
    sink is handed is a copy: it may write into it. Nothing here holds a sink that ends the process itself
    (`os._exit`, a crash in foreign code).
    """

    def __init__(
        self,
        sink: Sink,
        *,
        timeout_s: float = FINISH_TIMEOUT_S,
        queued_points: int = QUEUED_POINTS,
        warn: Callable[[str], None] | None = None,
    ):
        self._sink = sink
        self._name = type(sink).__name__
        self._timeout_s = timeout_s
        self._queued_points = queued_points
        self._calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._warn = warn or logging.getLogger("mcjax").warning
        self._lock = threading.Lock()
        self._warned = False
        self._broken = False
        self._points_until_s = float("inf")
        self._ended = threading.Event()
        self.dropped = 0
        """Live points that the sink did not get."""
        self._thread = threading.Thread(target=self._work, name=f"sink-{self._name}", daemon=True)

    def start(self, info: RunInfo) -> None:
        self._thread.start()
        self._calls.put(("start", (copy.deepcopy(info),)))

    def log(self, time_ns: int, metrics: Mapping[str, float]) -> None:
        """Never waits."""
        if self._broken:
            return
        if self._calls.qsize() >= self._queued_points:
            self.dropped += 1
        else:
            self._calls.put(("log", (time_ns, dict(metrics))))

    def finish(self, summary: Mapping[str, Any], directory: Path | None) -> None:
        """`close` and `wait` in one."""
        self.close(summary, directory)
        self.wait(time.monotonic() + self._timeout_s)

    def close(self, summary: Mapping[str, Any], directory: Path | None) -> None:
        """Ask for the end, and don't wait for it."""
        self._points_until_s = time.monotonic() + POINTS_SHARE * self._timeout_s
        self._calls.put(("finish", (copy.deepcopy(dict(summary)), directory)))
        self._calls.put(None)

    def wait(self, until_s: float) -> None:
        """Wait for the end until `until_s` of `time.monotonic`, not longer."""
        while not self._ended.is_set() and (left_s := until_s - time.monotonic()) > 0:
            self._ended.wait(min(left_s, LOOK_S))
        if not self._ended.is_set():
            self.give_up(f"did not finish within {self._timeout_s:g} s")
        elif self.dropped:
            self._say(f"was too slow: {self.dropped} live points were dropped")

    def give_up(self, why: str) -> None:
        """Leave the sink alone, whatever it is doing."""
        if not self._ended.is_set():
            self._broken = True
            self._say(f"{why}; its log is incomplete")

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            name, arguments = item
            if self._broken:
                continue
            if name == "log" and time.monotonic() > self._points_until_s:
                self.dropped += 1
                continue
            try:
                getattr(self._sink, name)(*arguments)
            except BaseException as error:  # a tracker may even call sys.exit
                self._broken = True
                self._say(f"failed in {name} and is left alone from here: {_text(error)}")
        self._ended.set()

    def _say(self, problem: str) -> None:
        with self._lock:
            first, self._warned = not self._warned, True
        if first:
            self._warn(f"tracker {self._name} {problem}; the run itself is not affected")


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else repr(error)
