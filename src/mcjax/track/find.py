"""What somebody means by a run: a directory, a name below `runs`, the first digits of a key, a pattern, or a sweep."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mcjax.errors import RunError
from mcjax.track import keys, record, sweep
from mcjax.track.state import DONE, state_of

BASE = Path("runs")
LEAST_DIGITS = 4


@dataclass(slots=True)
class Found:
    """Run directories in the order in which they were named, and the sweeps among what was named."""

    directories: list[Path] = field(default_factory=list[Path])
    sweeps: list[sweep.Sweep] = field(default_factory=list[sweep.Sweep])


def find(references: Sequence[str | Path], base: Path = BASE) -> Found:
    """What `references` name. Raises `RunError` for one that names nothing, or a key of several runs."""
    found = Found()
    for reference in references:
        for path in _paths(str(reference), base):
            if (path / sweep.FILE).exists():
                found.sweeps.append(sweep.read(path))
                found.directories += found.sweeps[-1].runs()
            else:
                found.directories.append(path)
    found.directories = list(dict.fromkeys(found.directories))
    return found


def find_one(reference: str | Path, base: Path = BASE) -> Path:
    """The one run directory that is meant. Raises `RunError`."""
    directories = find([reference], base).directories
    if len(directories) != 1:
        raise RunError(f"{reference}: {len(directories)} runs, where one is wanted")
    return directories[0]


def directories(base: Path = BASE) -> list[Path]:
    """Every run directory below `base`, whatever its state, in order of names."""
    try:
        entries = [entry.name for entry in os.scandir(base) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    return [base / name for name in sorted(entries) if name not in (sweep.FOLDER, "wandb") and not name.startswith(".")]


def _paths(reference: str, base: Path) -> list[Path]:
    if glob.has_magic(reference):
        matches = sorted(Path(match) for match in glob.glob(reference)) or sorted(base.glob(reference))
        found = [path for path in matches if path.is_dir() and (state_of(path)[0] or (path / sweep.FILE).exists())]
        if not found:
            raise RunError(f"{reference}: no run matches")
        return found
    for path in (Path(reference), base / reference, base / sweep.FOLDER / reference):
        if path.is_dir():
            return [path]
    if len(reference) >= LEAST_DIGITS and set(reference) <= set("0123456789abcdef"):
        return [_by_key(reference, base)]
    raise RunError(f"{reference}: no such run, neither a directory nor a name or key in {base} (`mcjax ls` lists them)")


def _by_key(start: str, base: Path) -> Path:
    """The newest run that is done of those whose key begins so; they are equal. Raises `RunError` for several keys."""
    found: dict[str, Path] = {}
    for key in keys.starting(base, start):
        for directory in keys.directories(base, key):
            if key not in found and (directory / DONE).exists() and record.read(directory).run_key == key:
                found[key] = directory
    if not found:  # runs that were brought here from elsewhere
        for directory in directories(base):
            if (directory / DONE).exists() and (key := record.read(directory).run_key).startswith(start):
                found[key] = directory
    if len(found) != 1:
        many = ", ".join(sorted(key[:12] for key in found)) or "none"
        raise RunError(f"{start}: {len(found)} runs with keys that begin so ({many}) are done in {base}")
    return next(iter(found.values()))
