"""What a tracker must offer: told of the start, of live figures, and of the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mcjax.track.record import RunRecord


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What is known when a run starts. `config` is resolved and plain; `environment` goes to `environment.json`."""

    backend: str
    seed: int
    name: str = ""
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    environment: Mapping[str, Any] = field(default_factory=dict[str, Any])
    record: RunRecord = field(default_factory=RunRecord)
    sources: Mapping[str, str] = field(default_factory=dict[str, str])
    """Code of the user's own to keep: file name below `strategies/`, and text."""


class Sink(Protocol):
    """Where a run is logged besides its tables. Behind `guard.Guarded` it may raise or hang, and only it suffers."""

    def start(self, info: RunInfo) -> None: ...

    def log(self, time_ns: int, metrics: Mapping[str, float]) -> None:
        """Live figures at `time_ns` of run time."""
        ...

    def finish(self, summary: Mapping[str, Any], directory: Path | None) -> None:
        """The run is over; `directory` holds its files, complete, or is None when nothing is kept."""
        ...
