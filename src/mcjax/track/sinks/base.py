"""What a tracker must offer: told of the start, of live figures, and of the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mcjax.track.record import RunRecord


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What is known when a run starts. `config` is resolved and plain; `environment` goes to `environment.json`.

    Sinks get a copy of their own of it, in which the values of secret environment variables are blanked.
    """

    backend: str
    seed: int
    name: str = ""
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    environment: Mapping[str, Any] = field(default_factory=dict[str, Any])
    record: RunRecord = field(default_factory=RunRecord)
    sources: Mapping[str, str] = field(default_factory=dict[str, str])
    """Code of the user's own to keep: file name below `strategies/`, and text."""
    directory: Path | None = None
    """The run directory, if there is one; `name` is its name then."""


class Sink(Protocol):
    """Where a run is logged besides its directory.

    Each is called on a thread of its own, in order. It may raise, hang or be slow in any of these, and may lack a
    package: it is warned of once, and the run goes on (`guard.Guarded`). Its constructor, which is called before the
    run begins, only checks and keeps settings; what is slow or may be missing belongs in `start`.
    """

    def start(self, info: RunInfo) -> None:
        """The run begins; the run directory, if there is one, is marked RUNNING."""
        ...

    def log(self, time_ns: int, metrics: Mapping[str, float]) -> None:
        """Live figures at `time_ns` of run time."""
        ...

    def finish(self, summary: Mapping[str, Any], directory: Path | None) -> None:
        """The run is over; `directory` holds its files, complete, or is None when nothing is kept."""
        ...
