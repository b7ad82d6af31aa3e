"""Contestants timed in turns, so that what else the machine does hits all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from measure import BenchmarkError


def nothing() -> None:
    """A contestant that needs no clearing up."""


@dataclass(frozen=True)
class Contestant:
    """`step` is timed and returns when its result is there; `after` clears up, untimed."""

    step: Callable[[], object]
    after: Callable[[], object] = nothing


@dataclass(frozen=True)
class Timing:
    """One contestant's rounds."""

    wall_s: list[float]
    cpu_s: list[float]

    @property
    def best_s(self) -> float:
        return min(self.wall_s)

    @property
    def median_s(self) -> float:
        return statistics.median(self.wall_s)

    @property
    def cores(self) -> float:
        """CPU time over wall time of the fastest round: below 2 on 2 cores, something waited or did not share out."""
        best = self.wall_s.index(self.best_s)
        return self.cpu_s[best] / self.wall_s[best]

    def row(self) -> dict[str, Any]:
        return {
            "best_s": self.best_s,
            "median_s": self.median_s,
            "cores": self.cores,
            "cpu_s": min(self.cpu_s),
            "rounds": len(self.wall_s),
        }


def interleaved(contestants: dict[str, Contestant], rounds: int) -> dict[str, Timing]:
    """`rounds` of each in turns, after one that is not counted."""
    timings = {name: Timing([], []) for name in contestants}
    for number in range(rounds + 1):
        for name, contestant in contestants.items():
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            contestant.step()
            wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
            contestant.after()
            if number:
                timings[name].wall_s.append(wall_s)
                timings[name].cpu_s.append(cpu_s)
    return timings


def speedup(ours: Timing, theirs: Timing) -> float:
    """How many times as fast ours is: the median over rounds, each against its neighbour in time."""
    return statistics.median(their / our for our, their in zip(ours.wall_s, theirs.wall_s, strict=True))


def peer(name: str) -> ModuleType:
    """`torch` or `transformers`. Raises `BenchmarkError` that says how to get it."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise BenchmarkError(f"{name} is missing; it comes with `pip install 'mcjax[parity]'`") from None
