"""Which run directories may go, and how they go: `mcjax prune`.

Whatever is running stays, and what might be (on another host, say); so does what is no run, and what a link leads to.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from mcjax.errors import RunError
from mcjax.track import record, sweep
from mcjax.track.find import directories
from mcjax.track.levels import SUMMARY, holds
from mcjax.track.record import RunRecord
from mcjax.track.run_directory import RunDirectory
from mcjax.track.state import state_of

STATES = ("killed", "failed", "done")
"""Those whose runs may go."""
GONE = ".pruned"
"""What a directory that is being removed is called; a leading dot hides it from everybody who looks for runs."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A run directory as pruning sees it. `ended_s` is seconds since 1970."""

    directory: Path
    state: str
    record: RunRecord
    ended_s: float
    in_sweep: bool
    nbytes: int
    table_bytes: int
    """Of its tables alone; 0 where there is no summary that could stay without them."""
    superseded_by: str = ""
    """A newer run that is done, of the same key, and holds at least as much."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What may go. All that is given must hold; `keep` and `budget_bytes` then spare the newest of what fits it."""

    states: Sequence[str] = STATES
    older_than_s: float = 0.0
    superseded: bool = False
    keep: int = 0
    """So many of those that fit stay, the newest."""
    budget_bytes: float | None = None
    """Only as many go, oldest first, as bring all runs together below it."""
    sweeps: bool = False
    """Also runs of sweeps."""
    tables: bool = False
    """Only their tables go: what stays is a run of `track.level=summary`."""

    def frees(self, entry: Entry) -> int:
        return entry.table_bytes if self.tables else entry.nbytes


def entries(base: Path) -> list[Entry]:
    """Every run in a folder, oldest first. Raises `RunError` for a sweep that cannot be read: its runs are unknown."""
    of_sweeps = {base / point.directory for each in _sweeps(base) for point in each.points if point.directory}
    found = [_entry(directory, of_sweeps) for directory in directories(base) if state_of(directory)[0]]
    found.sort(key=lambda entry: (entry.ended_s, entry.directory.name))
    newest: dict[str, Entry] = {}
    for index in range(len(found) - 1, -1, -1):
        entry = found[index]
        later = newest.get(entry.record.run_key) if entry.record.run_key else None
        if later is not None and holds(later.record.level, entry.record.level):
            found[index] = replace(entry, superseded_by=later.directory.name)
        elif entry.state == "done":
            newest[entry.record.run_key] = entry
    return found


def chosen(found: Sequence[Entry], rules: Rules, now_s: float) -> list[Entry]:
    """Those of `found`, which are in order of age, that may go."""
    fitting = [entry for entry in found if _fits(entry, rules, now_s)]
    fitting = fitting[: len(fitting) - rules.keep] if rules.keep < len(fitting) else []
    if rules.budget_bytes is None:
        return fitting
    left = sum(entry.nbytes for entry in found)
    going: list[Entry] = []
    for entry in fitting:
        if left <= rules.budget_bytes:
            break
        going.append(entry)
        left -= rules.frees(entry)
    return going


def remove(entry: Entry) -> None:
    """Remove a run directory. Raises `RunError` if it is not what it was when it was looked at, or cannot go."""
    directory = _unchanged(entry)
    hidden = directory.with_name(f".{directory.name}{GONE}")
    try:
        os.rename(directory, hidden)  # from here on nobody takes half a run for one
        shutil.rmtree(hidden)
    except OSError as problem:
        raise RunError(f"{directory}: cannot be removed: {problem}") from problem


def remove_tables(entry: Entry) -> None:
    """Remove a run's tables, and say so in what stays. Raises `RunError` as `remove` does."""
    directory = RunDirectory(_unchanged(entry))
    try:
        summary: dict[str, Any] = json.loads((directory.path / "summary.json").read_bytes())
        directory.write_summary({**summary, "level": SUMMARY})
        if (directory.path / record.FILE).exists():
            directory.write_record(replace(record.read(directory.path), level=SUMMARY))
        directory.remove_tables()
    except (OSError, ValueError) as problem:
        raise RunError(f"{directory.path}: its tables cannot be removed: {problem}") from problem


def sweep_up(base: Path) -> None:
    """Remove what a killed `prune` left behind."""
    for path in base.glob(f".*{GONE}"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def _fits(entry: Entry, rules: Rules, now_s: float) -> bool:
    return (
        entry.state in STATES
        and entry.state in rules.states
        and (rules.sweeps or not entry.in_sweep)
        and (not rules.superseded or entry.superseded_by != "")
        and now_s - entry.ended_s >= rules.older_than_s
        and (not rules.tables or entry.table_bytes > 0)
    )


def _entry(directory: Path, of_sweeps: set[Path]) -> Entry:
    state, _ = state_of(directory)
    try:
        known = record.read(directory)
    except RunError:  # damaged: what it says of itself does not count, its age and size do
        known = RunRecord()
    sizes = _sizes(directory)
    has_summary = state in ("done", "failed") and "summary.json" in sizes
    return Entry(
        directory,
        state,
        known,
        _ended_s(directory, known),
        known.sweep != "" or directory in of_sweeps,
        sum(sizes.values()),
        sum(size for name, size in sizes.items() if name.endswith(".parquet")) if has_summary else 0,
    )


def _sizes(directory: Path) -> dict[str, int]:
    """Bytes of each file below, by its path from there; a link counts as itself."""
    sizes: dict[str, int] = {}
    for folder, _, names in os.walk(directory, followlinks=False):
        for name in names:
            path = Path(folder, name)
            try:
                sizes[path.relative_to(directory).as_posix()] = path.lstat().st_size
            except FileNotFoundError:  # a run that goes on renames its files
                continue
    return sizes


def _ended_s(directory: Path, known: RunRecord) -> float:
    """When it ended, or began if it did not; without a record, when its marker was written."""
    try:
        return datetime.fromisoformat(known.ended or known.started).timestamp()
    except ValueError:
        return max((path.lstat().st_mtime for path in directory.iterdir()), default=0.0)


def _unchanged(entry: Entry) -> Path:
    directory = entry.directory
    if directory.is_symlink() or state_of(directory)[0] != entry.state:
        raise RunError(f"{directory}: is not {entry.state} any more, and stays")
    return directory


def _sweeps(base: Path) -> list[sweep.Sweep]:
    folder = base / sweep.FOLDER
    if not folder.is_dir():
        return []
    return [sweep.read(path) for path in sorted(folder.iterdir()) if (path / sweep.FILE).exists()]
