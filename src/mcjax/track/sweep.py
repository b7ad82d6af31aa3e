"""`sweeps/ID/sweep.json`: the points of a sweep, where each one's run lies, and what became of it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from mcjax.errors import RunError
from mcjax.track.redaction import redact

FOLDER = "sweeps"
FILE = "sweep.json"
VERSION = 1
WAITING, RUNNING, DONE, CACHED, FAILED, INTERRUPTED = "waiting", "running", "done", "cached", "failed", "interrupted"
STATES = (WAITING, RUNNING, DONE, CACHED, FAILED, INTERRUPTED)


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep. `directory` is relative to the folder of all runs; "" as long as there is none."""

    overrides: tuple[str, ...]
    run_key: str = ""
    directory: str = ""
    state: str = WAITING
    reason: str = ""
    """Why it failed."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep that was started, perhaps not ended. `directory` is where its table and pictures go."""

    directory: Path
    argv: tuple[str, ...] = ()
    question: str = ""
    started: str = ""
    ended: str = ""
    points: Sequence[Point] = field(default_factory=list[Point])

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def base(self) -> Path:
        """The folder of all runs."""
        return self.directory.parent.parent

    def runs(self) -> list[Path]:
        """The directories of the points that are done."""
        return [self.base / point.directory for point in self.points if point.state in (DONE, CACHED)]

    def missing(self) -> list[Point]:
        """The points that are not."""
        return [point for point in self.points if point.state not in (DONE, CACHED)]

    def write(self) -> None:
        """Replace the file as a whole: a reader never sees half of one, nor a secret."""
        values = {"version": VERSION, **redact(asdict(replace(self, directory=Path())))}
        values.pop("directory")
        self.directory.mkdir(parents=True, exist_ok=True)
        temporary = self.directory / f".{FILE}.tmp"
        temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, self.directory / FILE)


def create(base: Path) -> Path:
    """Make a directory for a sweep below the folder of all runs, dated as they are. Raises `OSError`."""
    folder = base / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    stem, count = datetime.now().astimezone().strftime("%Y-%m-%d_%H-%M-%S"), 1
    while True:
        path = folder / (stem if count == 1 else f"{stem}-{count}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            count += 1


def read(directory: Path) -> Sweep:
    """Raises `RunError` if it is none, damaged, or of a later version."""
    try:
        values: Any = json.loads((directory / FILE).read_bytes())
        if values["version"] > VERSION:
            raise RunError(f"{directory}: {FILE} has version {values['version']}, this mcjax reads up to {VERSION}")
        points = [_point(point) for point in values["points"]]
        return Sweep(
            directory, tuple(values["argv"]), values["question"], values["started"], values["ended"], points=points
        )
    except FileNotFoundError as problem:
        raise RunError(f"{directory}: no sweep (it has no {FILE})") from problem
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise RunError(f"{directory}: {FILE} is damaged ({problem!r})") from problem


def _point(values: dict[str, Any]) -> Point:
    words = [values[name] for name in ("run_key", "directory", "state", "reason")]
    return Point(tuple(values["overrides"]), *words)
