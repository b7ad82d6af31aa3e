"""The run directory as a sink: the one that keeps the tables, and the only one whose errors are the run's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcjax.errors import RunError
from mcjax.track.arrow import Table
from mcjax.track.levels import FULL, SUMMARY
from mcjax.track.metrics import headline
from mcjax.track.record import RunRecord
from mcjax.track.run_directory import RunDirectory, now
from mcjax.track.sinks.base import RunInfo
from mcjax.track.tables import StoredTables


class Files:
    """Keeps each run in a directory of its own under `directory`; `overview=False` leaves out overview.png."""

    def __init__(self, directory: str = "runs", overview: bool = True):
        self.base = Path(directory)
        self.overview = overview
        self._opened: RunDirectory | None = None
        self._record = RunRecord()

    @property
    def opened(self) -> RunDirectory:
        """The directory of the run that has started."""
        if self._opened is None:
            raise RunError(f"{self.base}: no run has started here")
        return self._opened

    def start(self, info: RunInfo) -> None:
        self._opened = RunDirectory.create(self.base, info.name)
        self._opened.write_config(info.config)
        self._opened.write_environment(info.environment)
        self._record = self._opened.write_record(info.record)
        self._opened.write_sources(info.sources)

    def log(self, time_ns: int, metrics: Mapping[str, float]) -> None:
        """Nothing to do: the same figures are rows of samples.parquet."""

    def keep(self, tables: Mapping[str, Table], summary: Mapping[str, Any]) -> None:
        """Write the tables, unless they are files already, and the summary; the marker stays RUNNING."""
        if not isinstance(tables, StoredTables):
            self.opened.write_tables(tables)
        self.opened.write_summary(summary)
        self._record = self.opened.write_record(
            replace(
                self._record,
                ended=now(),
                headline=headline(summary),
                digest=str(summary.get("digest", "")),
                level=summary.get("level", FULL),
                cut=summary.get("cut", ""),
            )
        )

    def finish(self, summary: Mapping[str, Any], directory: Path | None, failure: str = "") -> None:
        """Mark the run DONE, or FAILED where `failure` says why; at `track.level=summary` its tables go first."""
        if summary.get("level") == SUMMARY:
            self.opened.remove_tables()
        if failure:
            self.fail(failure)
        else:
            self.opened.done()

    def fail(self, reason: str) -> None:
        self.opened.failed(reason)
