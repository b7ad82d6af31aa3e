"""A finished run, read back: its summary, its config, and its tables, each read when first asked for."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mcjax.errors import RunError
from mcjax.track import record as records
from mcjax.track import tables as table_files
from mcjax.track.arrow import Table
from mcjax.track.levels import FULL, REQUESTS, SUMMARY, as_named_now, holds
from mcjax.track.migrations import migrated_summary
from mcjax.track.record import RunRecord
from mcjax.track.schemas import DIGESTED, SCHEMAS
from mcjax.track.state import DONE, FAILED, RUNNING, marker_of, who

if TYPE_CHECKING:
    from mcjax.track.compare.diff import Difference
    from mcjax.track.plots.drawn import Drawn
    from mcjax.track.story import RequestStory


class Run:
    """What a run left. `state` is "done", or "failed" for one that ended early, `reason` then says why.

    The tables are `pyarrow.Table`s; `run.requests.to_pandas()` gives a data frame. `directory` is None for a run that
    kept nothing on disk. Of a run kept at `track.level=summary` there are no tables: asking for one raises `RunError`.
    """

    def __init__(
        self,
        directory: Path | None,
        summary: Mapping[str, Any],
        config: Mapping[str, Any],
        tables: Mapping[str, Table],
        state: str = "done",
        reason: str = "",
        record: RunRecord | None = None,
    ):
        self.directory = directory
        self.summary = dict(summary)
        self.config = dict(config)
        self.state = state
        self.reason = reason
        self.cached = False
        """Whether it was finished before it was asked for, and not repeated."""
        self._kept = tables
        self._read: dict[str, Table] = {}
        self._record = record

    @property
    def record(self) -> RunRecord:
        """What identifies the run: its key, choices, flat config, the user's own code."""
        if self._record is None:
            assert self.directory is not None
            self._record = records.read(self.directory)
        return self._record

    @property
    def level(self) -> str:
        """How much of the run was kept: `summary`, `requests` or `full`."""
        return as_named_now(self.summary.get("level") or self.config.get("track", {}).get("level") or FULL)

    def require(self, level: str, lack: str) -> None:
        """Raise `RunError` for a run kept at a lower level than `level`; `lack` says what that means."""
        if holds(self.level, level):
            return
        cut = self.summary.get("cut")
        why, more = (f" ({cut})", ", and more of a budget") if cut else ("", "")
        raise RunError(
            f"{self.directory or 'this run'}: kept at track.level={self.level}{why}: {lack}; "
            f"run it again with track.level={level}{more}"
        )

    @property
    def requests(self) -> Table:
        """A row a request, however it ended."""
        return self.table("requests")

    @property
    def events(self) -> Table:
        """What happened, where and when; a row is a span of blocks or a step."""
        return self.table("events")

    @property
    def decisions(self) -> Table:
        """What was chosen, among what, what was expected, and what came of it."""
        return self.table("decisions")

    @property
    def reports(self) -> Table:
        """What policy saw, and as of when."""
        return self.table("reports")

    @property
    def samples(self) -> Table:
        """Gauges at fixed ticks of run time."""
        return self.table("samples")

    @property
    def outcomes(self) -> Table:
        """What real mechanisms answered; empty for a virtual run."""
        return self.table("outcomes")

    def table(self, name: str) -> Table:
        """One table by name. Raises `RunError` if its file is damaged, or was not kept."""
        self._require_tables()
        if name not in self._read:
            self._read[name] = self._kept[name]
        return self._read[name]

    def columns(self, name: str, *columns: str) -> Table:
        """Some columns of a table; of a run on disk, nothing else is read, and nothing is kept."""
        self._require_tables()
        return table_files.columns(self._kept, name, columns)

    def pieces(self, name: str, *columns: str) -> Iterator[Table]:
        """Some columns of a table, its rows a piece at a time: a large table need not be in memory as a whole."""
        self._require_tables()
        return table_files.pieces(self._kept, name, columns)

    def request(self, request_id: int) -> RequestStory:
        """Everything of one request: its timeline, and its decisions with their candidates.

        Raises `RunError` for an unknown request (names the nearest), and for a run of a lower `track.level` than full.
        """
        from mcjax.track.story import story_of

        return story_of(self, request_id)

    def plot(self, kind: str, **options: object) -> Drawn:
        """A picture (`mcjax.track.plots.kinds.KINDS` names them): a notebook shows it, `.save("fig.pdf")` keeps it.

        Raises `ConfigError` for an unknown kind or option, `RunError` for a run that did not keep what it needs.
        """
        from mcjax.track.plots.kinds import draw

        return draw(self, kind, **options)

    def diff(self, other: Run) -> Difference:
        """What tells another run from this one: config, environment, own code, first differing decision and token."""
        from mcjax.track.compare.diff import diff

        return diff(self, other)

    def trace(self, path: str | Path = "trace.pftrace.gz", *, requests: Sequence[int] = ()) -> Path:
        """Write a trace for Perfetto: all of the run, or of some requests. Returns where it lies.

        Raises `RunError` for a run that did not keep its events, `ConfigError` for a file that cannot be written.
        """
        from mcjax.track.perfetto.write import write_trace

        return write_trace(self, path, requests)

    @property
    def tables(self) -> dict[str, Table]:
        """Every table, by name."""
        return {name: self.table(name) for name in SCHEMAS}

    def _require_tables(self) -> None:
        self.require(REQUESTS, "it has its figures, and no tables")

    def __repr__(self) -> str:
        counts = self.summary.get("requests", {})
        place = self.directory or "in memory"
        share = f"{counts.get('completed')} of {counts.get('submitted')} requests completed"
        state = f"{self.state}, cached" if self.cached else self.state
        return f"Run({place}, {state}, backend={self.summary.get('backend')}, {share})"

    def __rich__(self) -> Any:
        from mcjax.track.console import summary_table

        return summary_table(self.summary)

    def _repr_html_(self) -> str:
        from mcjax.track.console import summary_rows

        def cell(text: str) -> str:
            return f"<td style='text-align:left'>{html.escape(text)}</td>"

        rows = "".join(f"<tr>{cell(name)}{cell(value)}</tr>" for name, value in summary_rows(self.summary))
        return f"<p><code>{html.escape(repr(self))}</code></p><table>{rows}</table>"


def load(path: str | Path) -> Run:
    """The run in a directory. A run that ended early loads too, if it got as far as its tables.

    Raises `RunError`, naming the directory, if it is no run, still RUNNING (or killed), damaged, or of a later version.
    """
    directory = Path(path)
    marker = marker_of(directory)
    note = _text(directory / marker).strip()
    if marker == RUNNING:
        raise RunError(f"{directory}: unfinished, {who(note)[1]}")
    if marker == FAILED and not (directory / "summary.json").exists():
        raise RunError(f"{directory}: the run failed before it had tables: {note}")
    try:
        summary = migrated_summary(json.loads(_text(directory / "summary.json")), directory)
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{directory}: summary.json is damaged ({error})") from error
    state, reason = ("done", "") if marker == DONE else ("failed", note)
    run = Run(directory, summary, _config(directory), table_files.StoredTables(directory), state, reason)
    if run.level != SUMMARY:
        for name in DIGESTED:
            table_files.check(name, directory)
    return run


def _config(directory: Path) -> dict[str, Any]:
    import yaml

    try:
        config = yaml.safe_load(_text(directory / "config.yaml"))
    except yaml.YAMLError as error:
        raise RunError(f"{directory}: config.yaml is damaged ({error})") from error
    if not isinstance(config, dict):
        raise RunError(f"{directory}: config.yaml is damaged (no mapping)")
    return cast("dict[str, Any]", config)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path.parent}: {path.name} is missing or damaged ({error})") from error
