"""One sweep, from its points to what is known of them: its record, its worker processes, its display."""

from __future__ import annotations

import os
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from mcjax.app import reuse
from mcjax.app.build import track_settings
from mcjax.app.compose import compose
from mcjax.app.sweep.given import Given
from mcjax.app.sweep.launcher import Batch
from mcjax.app.sweep.messages import Event, Job, Outcome
from mcjax.app.sweep.pool import Pool
from mcjax.app.sweep.progress import SweepDisplay
from mcjax.errors import ConfigError, RunError
from mcjax.track import sweep as records
from mcjax.track.console import Outlook
from mcjax.track.run import Run
from mcjax.track.run_directory import now
from mcjax.track.runs import Runs
from mcjax.track.sweep import FAILED, INTERRUPTED, RUNNING, Point, Sweep

WRITE_PERIOD_S = 1.0
"""How often the record is written, at most: a sweep may have thousands of points."""
DECIDES_BACKEND = ("backend", "experiment", "backend.name")


@dataclass(slots=True)
class _Played:
    """What is known of one point."""

    label: str
    """What tells it from the others."""
    words: tuple[str, ...]
    strategies: bytes
    record: Point
    run: Run | None = None


@dataclass(slots=True)
class Study:
    """Hydra's launcher calls `launch`; the same sweep may be handed to it in several batches.

    A failed point is in `failures`, and in the record, with its reason; it stops nothing.
    """

    argv: Sequence[str]
    strategies: Sequence[Given]
    display: SweepDisplay
    interrupted: bool = False
    begun: bool = False
    """Whether there was a sweep at all."""
    _points: list[_Played] = field(default_factory=list[_Played])
    _sweep: Sweep | None = None
    """None where nothing is kept on disk."""
    _written_s: float = 0.0

    def launch(self, config: DictConfig, batch: Batch) -> None:
        """Play a batch of points. Raises `ConfigError` before any is played; `RunError` if no record can be made."""
        if batch.workers is not None and (isinstance(batch.workers, bool) or batch.workers < 1):
            raise ConfigError("hydra.launcher.workers", batch.workers, "must be a whole number, 1 or more, or null")
        if not self.begun:
            self._begin(config)
        first = len(self._points)
        self._add(batch.points)
        added = range(first, len(self._points))
        if self.interrupted:
            for point in added:
                self.told(point, Outcome(INTERRUPTED, "interrupted before it began"))
            return
        real = self._real(added)
        slots = batch.workers or (1 if any(real.values()) else _cores())
        pool = Pool(min(slots, len(added)), self, _environment(), real.__getitem__)
        with self.display:
            name = self._sweep.name if self._sweep else ""
            self.interrupted = not pool.play(
                [(point, Job(self._points[point].words, name, self._points[point].strategies)) for point in added]
            )
        self._write()

    def runs(self) -> Runs:
        """The runs of the points that are done, in the order of the sweep; the others are refused, with reasons."""
        done = [point.run for point in self._points if point.run is not None and point.run.state == "done"]
        others = [point for point in self._points if point.run is None or point.run.state != "done"]
        refused = [(point.record.directory or point.label, point.record.reason) for point in others]
        return Runs(done, refused, self._sweep)

    @property
    def counts(self) -> Counter[str]:
        """How many points are in each state."""
        return Counter(point.record.state for point in self._points)

    @property
    def failures(self) -> list[tuple[str, Point]]:
        """The points that failed, and what tells each from the others."""
        return [(point.label, point.record) for point in self._points if point.record.state == FAILED]

    @property
    def base(self) -> Path | None:
        return self._sweep.base if self._sweep else None

    def end(self) -> None:
        """The record is complete."""
        if self._sweep is not None:
            self._sweep = replace(self._sweep, ended=now())
            self._write()

    def started(self, point: int) -> None:
        self._change(point, state=RUNNING)
        self.display.started(point)
        self._write_now_and_then()

    def told(self, point: int, event: Event) -> None:
        played = self._points[point]
        if isinstance(event, Outlook) and event.directory is not None:
            self._change(point, directory=self._relative(event.directory))
        if isinstance(event, Outcome):
            run = played.run = event.run
            changes: dict[str, Any] = {"state": event.state, "reason": event.reason}
            if run is not None:
                changes["run_key"] = run.record.run_key
                if run.directory is not None:
                    changes["directory"] = self._relative(run.directory)
            self._change(point, **changes)
            self._write_now_and_then()
        self.display.told(point, event)

    def said(self, point: int, line: str) -> None:
        self.display.said(point, line)

    def tick(self) -> None:
        self.display.tick()

    def _begin(self, config: DictConfig) -> None:
        self.begun = True
        base = reuse.base_of(track_settings(config).sinks)
        if base is None:
            return
        try:
            directory = records.create(base)
        except OSError as problem:
            raise RunError(f"the sweep's directory cannot be made: {problem}") from problem
        self._sweep = Sweep(directory, tuple(self.argv), str(config.question or ""), started=now())

    def _add(self, points: Sequence[tuple[str, ...]]) -> None:
        several = len(self.strategies) > 1
        shared = set(points[0]).intersection(*points) if several or len(points) > 1 else set[str]()
        new: list[_Played] = []
        for words in points:
            for given in self.strategies:
                own = [word.lstrip("+") for word in words if word not in shared]
                label = " ".join([*own, *(given.words if several else ())])
                new.append(_Played(label, words, given.pickled, Point((*words, *given.words))))
        self._points += new
        self.display.add([point.label for point in new])

    def _real(self, points: Sequence[int]) -> dict[int, bool]:
        """Which points are played on the real engine: each gets the machine, and a process, to itself."""
        known: dict[tuple[str, ...], bool] = {}
        found: dict[int, bool] = {}
        for point in points:
            deciding = tuple(
                word for word in self._points[point].words if word.lstrip("+").partition("=")[0] in DECIDES_BACKEND
            )
            if deciding not in known:
                known[deciding] = compose(deciding).backend.name == "jax"
            found[point] = known[deciding]
        return found

    def _relative(self, directory: Path) -> str:
        return str(directory) if self._sweep is None else os.path.relpath(directory, self._sweep.base)

    def _change(self, point: int, **values: Any) -> None:
        self._points[point].record = replace(self._points[point].record, **values)

    def _write_now_and_then(self) -> None:
        if time.monotonic() - self._written_s >= WRITE_PERIOD_S:
            self._write()

    def _write(self) -> None:
        if self._sweep is None:
            return
        self._written_s = time.monotonic()
        self._sweep = replace(self._sweep, points=[point.record for point in self._points])
        try:
            self._sweep.write()
        except OSError as problem:  # the runs are worth more than the record
            print(f"mcjax: {self._sweep.directory}: the sweep's record cannot be written: {problem}", file=sys.stderr)


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _environment() -> Mapping[str, str]:
    """That of this process, with what it added to its path: a notebook's folder, a script's, the working directory."""
    own = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths = dict.fromkeys(path or os.getcwd() for path in sys.path)
    added = [path for path in paths if path not in own and not path.endswith((".zip", "lib-dynload"))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(added)}
