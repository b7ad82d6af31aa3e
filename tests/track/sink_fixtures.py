"""Sinks that go wrong in one of their calls."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcjax.track.sinks.base import RunInfo

CALLS = ("start", "log", "finish")
INFO = RunInfo("sim", 7, "run", {"seed": 7})


class Listing:
    """Remembers its calls; `fails` (with `error`) and `hangs` (until `release`) name the call that goes wrong."""

    def __init__(self, fails: str = "", hangs: str = "", error: BaseException | None = None):
        self.calls: list[str] = []
        self.fails, self.hangs = fails, hangs
        self.error = error or SystemExit("tracker gave up")
        self.release = threading.Event()
        self.entered = threading.Event()
        self.told: list[Any] = []

    def _called(self, name: str, *arguments: Any) -> None:
        self.calls.append(name)
        self.told.append(arguments)
        if name == self.hangs:
            self.entered.set()
            self.release.wait()
        if name == self.fails:
            raise self.error

    def start(self, info: RunInfo) -> None:
        self._called("start", info)

    def log(self, time_ns: int, metrics: Mapping[str, float]) -> None:
        self._called("log", time_ns, metrics)

    def finish(self, summary: Mapping[str, Any], directory: Path | None) -> None:
        self._called("finish", summary, directory)
