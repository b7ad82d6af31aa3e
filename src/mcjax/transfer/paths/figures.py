"""What an engine's paths are doing and have done, counted by the NIC or transport that they leave by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from mcjax.transfer.paths.path import Path


@dataclass(slots=True)
class PathFigures:
    """Of one path, or of all that leave by one NIC."""

    waiting: int = 0
    """Attempts that wait to begin or to go on."""
    waiting_bytes: int = 0
    in_flight_bytes: int = 0
    moved_bytes: int = 0
    attempts: int = 0
    failures: int = 0
    bytes_per_s: float = 0.0
    """What a copy can expect, as learned: the mean over paths, by the copies they have had."""
    latency_s: float = 0.0
    is_well: bool = True
    """Whether no path is being left alone."""

    def for_summary(self) -> dict[str, Any]:
        """What is left to tell when all is over."""
        left_out = ("waiting", "waiting_bytes", "in_flight_bytes")
        return {name: value for name, value in asdict(self).items() if name not in left_out}


def figures_of(paths: Iterable[Path]) -> dict[str, PathFigures]:
    """By group, in order of first use; of those that any copy has been sent over."""
    found: dict[str, PathFigures] = {}
    for path in paths:
        if not path.attempts:
            continue
        group = found.setdefault(path.group, PathFigures())
        group.waiting += path.queued
        group.waiting_bytes += path.waiting_bytes
        group.in_flight_bytes += path.in_flight_bytes
        group.moved_bytes += path.moved_bytes
        group.failures += path.failures
        group.is_well &= path.health.is_well()
        bytes_per_s, latency_s = path.estimate.line()
        group.attempts += path.attempts
        weight = path.attempts / group.attempts
        group.bytes_per_s += (bytes_per_s - group.bytes_per_s) * weight
        group.latency_s += (latency_s - group.latency_s) * weight
    return found
