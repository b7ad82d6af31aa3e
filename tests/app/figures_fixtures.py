"""A small simulated sweep with a failed point, made once for the tests of figures and reports."""

from __future__ import annotations

from pathlib import Path

from conftest_app import SIM

import mcjax
from mcjax.track.run import Run
from mcjax.track.sweep import DONE, FAILED, Point, Sweep

QUESTION = 'Which selection is best <script>alert("1")</script> & for whom?'
SELECTIONS = ("random", "kvcache_centric")
SEEDS = (0, 1, 2)
OFTEN = ("workload.sessions=15", "workload.rate_per_s=8", "workload.first_prompt_tokens=[2000,30000]")


def small_sweep(base: Path) -> Sweep:
    """Two selections on three seeds each, below `base/runs`, and a fourth seed that failed."""
    points: list[Point] = []
    for selection in SELECTIONS:
        for seed in SEEDS:
            overrides = (f"sched/prefill={selection}", f"seed={seed}")
            where = (f"track.sinks.0.directory={base / 'runs'}", f"question={quoted(QUESTION)}")
            overview = f"track.sinks.0.overview={str(seed == 0).lower()}"
            run: Run = mcjax.run([*SIM, *OFTEN, *where, overview, *overrides], progress=False)
            assert run.directory is not None
            points.append(Point(overrides, run.record.run_key, run.directory.name, DONE))
    points.append(Point(("sched/prefill=random", "seed=3"), state=FAILED, reason="Deadlock: <nobody> moves"))
    directory = base / "runs" / "sweeps" / "selections"
    argv = ("mcjax", "-m", *SIM, *OFTEN, f"sched/prefill={','.join(SELECTIONS)}", "seed=0,1,2,3")
    sweep = Sweep(directory, argv, QUESTION, "2026-01-01T10:00:00+00:00", "2026-01-01T10:05:00+00:00", points)
    sweep.write()
    return sweep


def quoted(text: str) -> str:
    """As the command line takes it."""
    return "'" + text.replace("'", "\\'") + "'"
