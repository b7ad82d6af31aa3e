"""A finished virtual run of the same key is taken instead of running again, if it kept what is asked for now."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from mcjax.errors import RunError
from mcjax.track import keys, record
from mcjax.track.flat import flat
from mcjax.track.levels import holds
from mcjax.track.record import RunRecord
from mcjax.track.run import Run, load
from mcjax.track.sinks.files import Files
from mcjax.track.state import DONE

VIRTUAL = ("sim", "check", "hits")
"""Worlds whose runs are functions of their key."""


def finished(plain: Mapping[str, Any], run_key: str, sinks: Sequence[Any]) -> Run | None:
    """The run that need not be repeated, the newest if there are several."""
    base = base_of(sinks)
    if not run_key or base is None or plain["rerun"] or plain["backend"]["name"] not in VIRTUAL:
        return None
    for directory in keys.directories(base, run_key):
        if not (directory / DONE).exists():
            continue
        try:
            kept = record.read(directory)
            if kept.run_key == run_key and _suffices(kept, flat(plain), directory):
                run = load(directory)
                if holds(run.level, plain["track"]["level"]):
                    run.cached = True
                    return run
        except RunError:  # damaged, or of another version: it is run again
            continue
    return None


def note(run_key: str, sinks: Sequence[Any], directory: Path | None) -> None:
    """Let later runs find the one that begins in `directory`. Without it they only run once more."""
    base = base_of(sinks)
    if run_key and base is not None and directory is not None:
        with contextlib.suppress(OSError):
            keys.add(base, run_key, directory.name)


def tell(run: Run) -> None:
    """One line for the terminal."""
    print(f"cached: {run.directory} has finished with this config, code and inputs (rerun=true runs it again)")


def base_of(sinks: Sequence[Any]) -> Path | None:
    """The folder of the run directories, or None where none is made."""
    return next((sink.base for sink in sinks if isinstance(sink, Files)), None)


def _suffices(kept: RunRecord, asked: Mapping[str, Any], directory: Path) -> bool:
    """Whether a run kept at least what is asked for now; figures and samples depend on two of these settings too."""
    if any(kept.config.get(key) != asked.get(key) for key in ("track.warmup_s", "track.sample_period_s")):
        return False
    return all(
        sink in _sinks(kept.config) or (_is_files(sink) and _has_picture(sink, directory)) for sink in _sinks(asked)
    )


def _sinks(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the sinks were told, without where they write to."""
    sinks = cast("list[dict[str, Any]]", config.get("track.sinks") or [])
    return [{name: value for name, value in sink.items() if name != "directory"} for sink in sinks]


def _is_files(sink: Mapping[str, Any]) -> bool:
    return sink.get("_target_") == f"{Files.__module__}.{Files.__qualname__}"


def _has_picture(sink: Mapping[str, Any], directory: Path) -> bool:
    return not sink.get("overview", True) or (directory / "overview.png").exists()
