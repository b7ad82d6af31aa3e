"""Everything that keeps a run: its settings, its directory and its sinks, opened and closed together."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcjax.errors import ConfigError
from mcjax.track.arrow import Table
from mcjax.track.levels import FULL, SUMMARY, check_level
from mcjax.track.redaction import redact
from mcjax.track.run import Run
from mcjax.track.sinks.base import RunInfo, Sink
from mcjax.track.sinks.files import Files
from mcjax.track.sinks.guard import FINISH_TIMEOUT_S, Guarded
from mcjax.track.summary import finite


@dataclass(frozen=True)
class Settings:
    """The keys of `conf/track`. Raises `ConfigError` for values that cannot work."""

    warmup_s: float = 0.0
    level: str = FULL
    budget_bytes: float | None = None
    sample_period_s: float | None = None
    finish_timeout_s: float = FINISH_TIMEOUT_S
    sinks: Sequence[Sink] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_s < float("inf"):
            raise ConfigError("track.warmup_s", self.warmup_s, "must be 0 or more seconds")
        check_level(self.level)
        if self.budget_bytes is not None and not 0 < self.budget_bytes < float("inf"):
            raise ConfigError("track.budget_bytes", self.budget_bytes, "must be more than 0 bytes, or null")
        if self.sample_period_s is not None and not 0 < self.sample_period_s < float("inf"):
            raise ConfigError("track.sample_period_s", self.sample_period_s, "must be more than 0 seconds")
        if not 0 < self.finish_timeout_s < float("inf"):
            raise ConfigError("track.finish_timeout_s", self.finish_timeout_s, "must be more than 0 seconds")

    def period_s(self, backend: str) -> float:
        """Seconds between samples: as set, else what suits runs of seconds (`jax`) or of hours."""
        return self.sample_period_s or (0.1 if backend == "jax" else 1.0)


class Tracker:
    """Opens the run directory (if a `Files` sink is among `sinks`) and tells all other sinks, each behind its guard.

    Raises `OSError` when the directory cannot be made: without it the run would be for nothing. `timeout_s` is how long
    all sinks together may take for their end.
    """

    def __init__(self, sinks: Sequence[Sink], info: RunInfo, timeout_s: float = FINISH_TIMEOUT_S):
        self._info = info
        self._timeout_s = timeout_s
        self._files = next((sink for sink in sinks if isinstance(sink, Files)), None)
        self._guarded = [Guarded(sink, timeout_s=timeout_s) for sink in sinks if not isinstance(sink, Files)]
        if self._files is not None:
            self._files.start(info)
        if self._guarded:
            told = _told(info, self.directory)
            for sink in self._guarded:
                sink.start(told)

    @property
    def directory(self) -> Path | None:
        """Where the run is kept, or None."""
        return self._files.opened.path if self._files is not None else None

    def log(self, time_ns: int, metrics: Mapping[str, float]) -> None:
        """Live figures for the sinks; never waits."""
        for sink in self._guarded:
            sink.log(time_ns, metrics)

    def finish(self, tables: Mapping[str, Table], summary: Mapping[str, Any], failure: str = "") -> Run:
        """Write everything, mark the run DONE (or FAILED: `failure` says why), tell the sinks, hand the run back."""
        plain = finite(summary)
        state = "failed" if failure else "done"
        record = self._info.record if self.directory is None else None  # else it is read from there
        if self._files is not None:
            self._files.keep(tables, plain)
            if self._files.overview:
                _draw(Run(self.directory, {**plain, "level": FULL}, self._info.config, tables))
            self._files.finish(plain, self.directory, failure)
        self._finish_sinks(redact(plain))
        if plain.get("level") == SUMMARY:
            tables = dict[str, Table]()
        return Run(self.directory, plain, self._info.config, tables, state, failure, record)

    def abandon(self, reason: str) -> None:
        """The run ended before it had tables: leave FAILED with the reason. The sinks are told nothing more."""
        if self._files is not None:
            self._files.fail(reason)

    def _finish_sinks(self, summary: Mapping[str, Any]) -> None:
        """The run is kept by now: an interrupt ends the waiting for its sinks, and nothing else."""
        until_s = time.monotonic() + self._timeout_s
        try:
            for sink in self._guarded:
                sink.close(summary, self.directory)
            for sink in self._guarded:
                sink.wait(until_s)
        except KeyboardInterrupt:
            for sink in self._guarded:
                sink.give_up("was interrupted")


def _told(info: RunInfo, directory: Path | None) -> RunInfo:
    """What sinks are told: no secrets, and where the run is kept."""
    record = replace(info.record, argv=tuple(redact(list(info.record.argv))), config=redact(info.record.config))
    name = directory.name if directory is not None else info.name
    shown = {"config": redact(info.config), "environment": redact(info.environment), "sources": redact(info.sources)}
    return replace(info, record=record, name=name, directory=directory, **shown)


def _draw(run: Run) -> None:
    """overview.png is an extra: a picture that cannot be drawn must not cost a run that is otherwise whole."""
    from mcjax.track.plots.overview import overview

    assert run.directory is not None
    try:
        overview(run).savefig(run.directory / "overview.png")
    except Exception as error:
        logging.getLogger("mcjax").warning("overview.png could not be drawn: %r", error)
