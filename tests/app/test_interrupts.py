"""Partial results survive Ctrl-C; a run that was killed says so."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest_app import SMALL, Answer, runs

import mcjax as package
from mcjax.errors import RunError
from mcjax.sched.base import PrefillChoice
from mcjax.sched.view import ClusterView
from mcjax.types import Request

Command = Callable[..., Answer]
REAL = ("workload.sessions=3", "track.sinks.0.overview=false", "workload.rate_per_s=50")
KILLS = ("sched/prefill=custom", "sched.prefill._target_=my_policy.Kills")


class Stops:
    """Presses Ctrl-C at its fifth choice."""

    def __init__(self) -> None:
        self.calls = 0

    def choose(self, request: Request, view: ClusterView, rng: np.random.Generator) -> PrefillChoice:
        self.calls += 1
        if self.calls == 5:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):  # it may have to come from another thread
                time.sleep(0.01)
        return PrefillChoice(0)


@pytest.mark.parametrize(
    "world", [pytest.param(SMALL, id="sim"), pytest.param(REAL, id="jax", marks=pytest.mark.check_long)]
)
def test_interrupted_command(fresh: Command, place: Path, world: tuple[str, ...]) -> None:
    answer = fresh(*world, *KILLS, f"sched.prefill.signal={int(signal.SIGINT)}")
    assert answer.status == 130, answer.err
    assert "interrupted; the tables hold what there was" in answer.err
    assert "Traceback" not in answer.err
    assert "never awaited" not in answer.err
    assert "was destroyed" not in answer.err
    run = package.load(runs(place)[0])
    assert (run.state, run.reason) == ("failed", "interrupted")
    assert run.decisions.num_rows >= 2
    assert {name: table.num_rows for name, table in run.tables.items()}.keys() >= {"requests", "events", "reports"}


def test_killed_run_is_refused_by_name(fresh: Command, place: Path) -> None:
    answer = fresh(*SMALL, *KILLS, f"sched.prefill.signal={int(signal.SIGKILL)}")
    assert answer.status == -signal.SIGKILL
    (directory,) = runs(place)
    assert (directory / "RUNNING").exists()
    with pytest.raises(RunError, match=f"{directory.name}: unfinished, process .* was killed"):
        package.load(directory)


def test_interrupt_from_python(place: Path) -> None:
    run = package.run(SMALL, prefill=Stops())
    assert (run.state, run.reason) == ("failed", "interrupted")
    assert 0 < run.summary["requests"]["completed"] < 5
    assert package.load(runs(place)[0]).summary == run.summary


@pytest.mark.parametrize("own_handler", [False, True], ids=["jupyter", "asyncio.run"])
def test_interrupt_inside_a_running_loop(place: Path, own_handler: bool) -> None:
    async def main() -> package.Run:
        return package.run(SMALL, prefill=Stops())

    if own_handler:
        run = asyncio.run(main())
    else:
        loop = asyncio.new_event_loop()
        run = loop.run_until_complete(main())
        loop.close()
    assert (run.state, run.reason) == ("failed", "interrupted")
    assert package.load(runs(place)[0]).state == "failed"
