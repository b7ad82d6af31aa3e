"""One point of a validation: the same traffic at one load, for real or simulated; played once, and kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from mcjax.app.build import build, workload_of
from mcjax.app.compose import compose
from mcjax.app.plugins import Plugins
from mcjax.app.run import run
from mcjax.app.validation.calibration import Effort, calibrate
from mcjax.app.validation.found import Found
from mcjax.cost.measured import Sizes
from mcjax.errors import ConfigError, RunError
from mcjax.kvpool.keys import KeyTable
from mcjax.track.recorder import TableRecorder
from mcjax.track.run import Run, load
from mcjax.track.state import DONE
from mcjax.track.tracker import Settings as TrackSettings

SATURATED = "saturated"
"""The load at which every session begins at once."""

ALL_AT_ONCE_PER_S = 10_000.0
OWN = ("backend", "cost", "verify", "track", "workload.rate_per_s", "workload.sessions", "seed", "experiment", "debug")
"""What a validation sets itself."""
REAL_ONLY = ("backend.", "kernels=", "kernels.")
"""Overrides of the real engine: the simulated one takes these sizes from what was measured."""


@dataclass(frozen=True)
class Settings:
    """What is compared: `overrides` of a run on the real engine, at these loads (shares of the capacity)."""

    overrides: tuple[str, ...]
    loads: tuple[float, ...]
    repeats: int
    sessions: int
    effort: Effort

    def check(self) -> None:
        """Raise `ConfigError` for what a validation cannot do, before anything is measured."""
        for word in self.overrides:
            key = word.lstrip("+~").split("=")[0]
            if key in OWN or key.startswith("track."):
                raise ConfigError(key, word, "a validation sets this itself", [f"keys other than {', '.join(OWN)}"])
        for share in self.loads:
            if not 0 < share < 2:
                raise ConfigError("--loads", share, "must be shares of the capacity, more than 0 and less than 2")
        for name, value in (("--repeats", self.repeats), ("--sessions", self.sessions)):
            if value < 1:
                raise ConfigError(name, value, "must be at least 1")
        workload = compose(self._engine()).workload
        for key in ("rate_per_s", "sessions"):
            if key not in workload:
                problem = f"has no {key}, by which loads are set"
                raise ConfigError("workload", workload["_target_"], problem, ["workload=chat", "workload=synthetic"])

    def real(self, load_name: str, capacity_per_s: float, seed: int, folder: Path) -> list[str]:
        """The overrides of a real run: so many sessions that a share of the capacity begins in a second."""
        return [*self._engine(), *self._traffic(load_name, capacity_per_s, seed), _sink(folder)]

    def simulated(self, load_name: str, capacity_per_s: float, seed: int, machine: Path, folder: Path) -> list[str]:
        """The overrides of the same run, simulated on the machine of a file."""
        own = [word for word in self._engine() if not word.startswith((*REAL_ONLY, "verify="))]
        world = ["backend=sim", "cost=measured", f"cost.path='{machine}'"]
        return [*world, *own, *self._traffic(load_name, capacity_per_s, seed), _sink(folder)]

    def _engine(self) -> list[str]:
        return ["verify=false", *self.overrides]

    def _traffic(self, load_name: str, capacity_per_s: float, seed: int) -> list[str]:
        rate = ALL_AT_ONCE_PER_S if load_name == SATURATED else round(float(load_name) * capacity_per_s, 6)
        return [f"workload.sessions={self.sessions}", f"workload.rate_per_s={rate}", f"seed={seed}"]


def _sink(folder: Path) -> str:
    target = "mcjax.track.sinks.files.Files"
    return f"track.sinks=[{{_target_: {target}, directory: '{folder}', overview: false}}]"


def play(overrides: Sequence[str], folder: Path, anew: bool = False) -> Run:
    """The run of these overrides: the one in `folder`, if it was played to its end before, else a new one.

    With `anew` a new one in any case.

    Raises `RunError` if some request was not served: latencies of the rest would say nothing.
    """
    wanted = _comparable(cast("dict[str, Any]", OmegaConf.to_container(compose(overrides), resolve=True)))
    for marker in [] if anew else sorted(folder.glob(f"*/{DONE}"), reverse=True):
        try:
            kept = load(marker.parent)
        except RunError:
            continue
        if _comparable(kept.config) == wanted:
            return kept
    done = run([*overrides, "rerun=true"], progress=False)
    counts = done.summary["requests"]
    if done.state != "done":
        raise KeyboardInterrupt
    if counts["completed"] != counts["submitted"]:
        raise RunError(f"{done.directory}: {counts['completed']} of {counts['submitted']} requests were completed")
    return done


def _comparable(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("track", "plugins", "rerun")}


def measure(overrides: Sequence[str], effort: Effort, report: Callable[[str, float], None]) -> tuple[Found, Sizes]:
    """Calibrate the engine of these overrides in this process; what was found, and the engine's sizes."""
    config, table = compose(overrides), KeyTable()
    track = TrackSettings(level="requests")
    recorder = TableRecorder(table.key, track.level)
    rehearsal = build(config, Plugins({}), workload_of(config), table, recorder, track)
    world = rehearsal.world

    async def main() -> tuple[Found, Sizes]:
        try:
            found = await calibrate(world, rehearsal.instances, effort, report)
            spec = rehearsal.instances[0]
            capacity = world.instance(spec.name, f"node-{spec.name}", spec.role).executor.capacity()
            pool = world.pool_store(f"node-{spec.name}")
            return found, Sizes(
                pages=capacity.pages,
                page_tokens=capacity.page_tokens,
                max_batch=capacity.max_batch,
                chunk_tokens=capacity.chunk_tokens,
                max_context_tokens=capacity.max_context_tokens,
                pool_blocks=pool.capacity,
                shares_decoded=world.shares_decoded,
            )
        finally:
            await world.close()

    return world.run(main)
