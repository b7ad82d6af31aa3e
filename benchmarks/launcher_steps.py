"""What a step costs more through a worker process: `python benchmarks/launcher_steps.py [--rounds 3] [--steps 300]`.

The same executor, in this process and in one of its own, runs plans of one decode step (a sequence of one token of
context). Of each plan: how much longer it took to be answered than its step took. Rounds alternate; the median of all
plans is told, and how long each world took to be ready. docs/launcher.md has the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from measure import machine, say
from simulator import positive
from tables import table

LAUNCHERS = ("embedded", "processes")
WARM_UP = 20
"""Plans of each round that do not count."""


@dataclass
class Found:
    """Of one launcher, in seconds."""

    step_s: list[float] = field(default_factory=list)
    beyond_s: list[float] = field(default_factory=list)
    ready_s: list[float] = field(default_factory=list)


def play(launcher: str, steps: int, found: Found) -> None:
    """Make the world of a config with one mixed instance, and run the plans."""
    from mcjax import aio
    from mcjax.app.build import build, track_settings, workload_of
    from mcjax.app.compose import compose
    from mcjax.app.plugins import Plugins
    from mcjax.engine.base import Kind, StepItem, StepPlan
    from mcjax.kvpool.keys import KeyTable
    from mcjax.track.recorder import TableRecorder
    from mcjax.types import Role, Sampling

    config = compose([f"launcher={launcher}", "cluster=1m", "track=none"])
    keys = KeyTable()
    recorder = TableRecorder(keys.key, "summary")
    world = build(config, Plugins({}), workload_of(config), keys, recorder, track_settings(config)).world

    async def main() -> None:
        began_s = time.perf_counter()
        await world.prepare([("m0", Role.MIXED)], lambda what, share: None)
        found.ready_s.append(time.perf_counter() - began_s)
        aio.start_of_run()
        executor = world.instance("m0", "node-m0", Role.MIXED).executor
        item = StepItem(1, Kind.DECODE, 0, 1, [0], Sampling(), np.array([1], np.int32))
        for number in range(WARM_UP + steps):
            began_ns = time.perf_counter_ns()
            progress = await executor.run(StepPlan([item]), 1)
            took_ns = time.perf_counter_ns() - began_ns
            step_ns = int(progress.ends_ns[-1]) - progress.start_ns
            if number >= WARM_UP:
                found.step_s.append(step_ns / 1e9)
                found.beyond_s.append((took_ns - step_ns) / 1e9)
        await world.close()

    world.run(main)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="launcher_steps.py", description="What a step costs through a worker.")
    parser.add_argument("--rounds", type=positive, default=3, help="of each launcher, in turn")
    parser.add_argument("--steps", type=positive, default=300, help="plans in a round")
    options = parser.parse_args(arguments)
    found = {launcher: Found() for launcher in LAUNCHERS}
    for number in range(options.rounds):
        for launcher in LAUNCHERS:
            say(f"round {number + 1}: {launcher}")
            play(launcher, options.steps, found[launcher])
    rows: list[list[Any]] = [["launcher", "step ms", "beyond ms", "p90 ms", "ready s"]]
    for launcher, times in found.items():
        beyond = sorted(times.beyond_s)
        rows.append(
            [
                launcher,
                f"{statistics.median(times.step_s) * 1e3:.3f}",
                f"{statistics.median(beyond) * 1e3:.3f}",
                f"{beyond[len(beyond) * 9 // 10] * 1e3:.3f}",
                f"{statistics.median(times.ready_s):.1f}",
            ]
        )
    print(table(rows[0], rows[1:]))
    print(json.dumps({"machine": machine(), "load": os.getloadavg()[0]}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
