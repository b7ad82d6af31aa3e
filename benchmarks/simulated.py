"""One `mcjax` run in a process of its own, and what it left behind."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import BenchmarkError, Usage, measured


@dataclass(frozen=True)
class Simulated:
    usage: Usage
    summary: dict[str, Any]
    events: dict[str, int]
    """How many events of each kind; empty unless asked for."""

    @property
    def submitted(self) -> int:
        return int(self.summary["requests"]["submitted"])

    def row(self) -> dict[str, Any]:
        """What every table of results has of a run."""
        return {
            **self.usage.row(),
            "requests": self.summary["requests"],
            "cpu_per_request_us": 1e6 * self.usage.cpu_s / self.submitted,
            "virtual_s": self.summary["duration_s"],
            "ttft_s": self.summary["ttft_s"],
            "tbt_s": self.summary["tbt_s"],
            "digest": self.summary["digest"],
        }


def simulate(folder: Path, name: str, overrides: Sequence[str], count_events: bool = False) -> Simulated:
    """`mcjax OVERRIDES` in `folder`; the run directory is read and removed. Every table is written, no plot is drawn.

    A run directory of a million requests is large, and its figures are in `summary.json`.
    """
    place = folder / "runs" / name
    shutil.rmtree(place, ignore_errors=True)
    told = [*overrides, "rerun=true", f"track.sinks.0.directory=runs/{name}", "track.sinks.0.overview=false"]
    arguments = [sys.executable, "-m", "mcjax.cli", *told]
    usage = measured(arguments, folder, folder / "logs" / f"{name}.log", shlex.join(["mcjax", *told]))
    found = [path for path in place.iterdir() if path.is_dir() and not path.name.startswith(".")]
    if len(found) != 1 or not (found[0] / "DONE").exists():
        raise BenchmarkError(f"{usage.command}: left no finished run in runs/{name}")
    summary = json.loads((found[0] / "summary.json").read_text())
    events = _event_kinds(found[0]) if count_events else {}
    shutil.rmtree(place)
    return Simulated(usage, summary, events)


def _event_kinds(directory: Path) -> dict[str, int]:
    import mcjax

    return dict(Counter(mcjax.load(directory).events.column("kind").to_pylist()))
