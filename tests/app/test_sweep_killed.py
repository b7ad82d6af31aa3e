"""A sweep that is killed leaves no process behind, and, repeated, does only what is missing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from sweep_fixtures import DEADLINE_S, POLICIES, alive, running, start, states, sweeps, wait_until, workers, write_trace

from mcjax.errors import RunError
from mcjax.track.find import directories
from mcjax.track.run import load
from mcjax.track.sweep import Sweep


def folder(place: Path, name: str) -> Path:
    """A working directory with the same strategies and trace in it."""
    made = place / name
    made.mkdir()
    (made / "policies.py").write_text(POLICIES)
    write_trace(made / "trace.jsonl", 24)
    return made


def digests(sweep: Sweep) -> dict[tuple[str, ...], str]:
    """Of each point that is there, by its words; those read from the files again."""
    return {point.overrides: load(sweep.base / point.directory).summary["digest"] for point in sweep.points}


def play(place: Path, arguments: Sequence[str]) -> tuple[int, str, str]:
    process = start(place, *arguments, GO_ON="1")
    out, err = process.communicate(timeout=15 * DEADLINE_S)
    return process.returncode, out, err


def kill_in_the_middle(place: Path, arguments: Sequence[str], in_the_middle: Callable[[], bool]) -> list[str]:
    """Start a sweep, kill its first process when it is time, see the others go. Returns the runs that were done."""
    process = start(place, *arguments)
    wait_until("the sweep is in the middle of some points", in_the_middle)
    players = workers(place)
    assert players
    process.send_signal(signal.SIGKILL)
    process.communicate()
    # One that began its point after we looked is marked by now, too.
    wait_until("the worker processes are gone", lambda: not any(map(alive, [*players, *workers(place)])))
    done = [path.name for path in directories(place / "runs") if (path / "DONE").exists()]
    left = running(place)
    assert left, "what was being played stays marked so"
    for path in left:
        with pytest.raises(RunError, match=r"unfinished, process [0-9]+, which ran it, was killed"):
            load(path)
    return done


def check_repeated(place: Path, whole: Path, arguments: Sequence[str], done: Sequence[str]) -> None:
    """The same command ends the sweep with what is missing, and every point equals that of an unbroken one."""
    (broken,) = sweeps(place)
    before = set(directories(place / "runs"))
    status, out, err = play(place, arguments)
    assert status == 0, err
    _, repeated = sweeps(place)
    assert len(repeated.points) == len(broken.points)
    # Of the repeated sweep's points: what ended just before the end may not stand in the broken one's list any more.
    expected = ["cached" if point.directory in done else "done" for point in repeated.points]
    assert states(repeated) == expected
    assert out.count(" cached: ") == expected.count("cached") == len(done)
    played = {repeated.base / point.directory for point in repeated.points if point.state == "done"}
    assert set(directories(place / "runs")) - before == played, "nothing was played twice"
    status, _, err = play(whole, arguments)
    assert status == 0, err
    (unbroken,) = sweeps(whole)
    assert set(states(unbroken)) == {"done"}
    assert digests(repeated) == digests(unbroken)


@pytest.mark.check_long
def test_a_killed_sweep_is_repeated_by_its_own_command(place: Path) -> None:
    """Two selections, two slices; the first two points end, and those after them wait to be killed."""
    broken, whole = folder(place, "broken"), folder(place, "whole")
    arguments = [
        *("-m", "experiment=mooncake_8p8d", "cluster=2p2d", "track.sinks.0.overview=false", "sched/prefill=custom"),
        *("sched.prefill._target_=policies.WaitsAfterTwo,policies.AlsoWaitsAfterTwo",),
        *("workload.path=trace.jsonl", "+slices=2", "hydra.launcher.workers=2"),
    ]
    done = kill_in_the_middle(
        broken, arguments, lambda: len(running(broken)) == 2 and len(list(broken.glob("runs/*/DONE"))) >= 2
    )
    assert len(done) == 2
    check_repeated(broken, whole, arguments, done)


@pytest.mark.check_long
@pytest.mark.timeout(1800)
def test_a_killed_sweep_over_real_traces(place: Path, traces: Callable[[str], Path]) -> None:
    """Five selections, two traces, eight slices, of which the first requests; killed when a quarter is done."""
    broken, whole = place / "broken", place / "whole"
    for made in (broken, whole):
        made.mkdir()
        for name in ("conversation", "synthetic"):
            shutil.copy(traces(f"mooncake_fast25_{name}.jsonl"), made / f"{name}.jsonl")
    arguments = [
        *("experiment=prefill_selections", "track=files", "track.level=requests", "track.sinks.0.overview=false"),
        *("workload.path=conversation.jsonl,synthetic.jsonl", "workload.limit=800", "+slices=8"),
    ]
    quarter = 20

    def in_the_middle() -> bool:
        return len(list(broken.glob("runs/*/DONE"))) >= quarter and bool(running(broken))

    done = kill_in_the_middle(broken, arguments, in_the_middle)
    assert quarter <= len(done) < 80
    check_repeated(broken, whole, arguments, done)
    assert len(sweeps(whole)[0].points) == 80


def test_a_worker_sees_its_parent_go_also_where_another_process_holds_the_socket(place: Path) -> None:
    code = """
import os, time
from mcjax.app.sweep.process import WorkerProcess

worker = WorkerProcess({**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, os.sys.path))})
holder = os.fork()
if holder == 0:
    time.sleep(600)
print(worker._process.pid, holder, flush=True)
os._exit(0)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker, holder = map(int, parent.stdout.readline().split())
    try:
        assert parent.wait(60) == 0
        wait_until("the worker is gone", lambda: not alive(worker))
        assert alive(holder)
    finally:
        os.kill(holder, signal.SIGKILL)


@pytest.mark.check_long
@pytest.mark.timeout(600)
def test_points_on_the_real_engine_come_one_after_the_other_in_fresh_processes(place: Path) -> None:
    (place / "policies.py").write_text(POLICIES)
    words = ["workload.sessions=2", "verify=false", "track.sinks.0.overview=false", "sched/prefill=custom", "+seeds=2"]
    status, out, err = play(place, [*words, "sched.prefill._target_=policies.Tells"])
    assert status == 0, err
    lines = out.splitlines()
    assert len({line.split()[4] for line in lines if "played by" in line}) == 2
    ended = next(index for index, line in enumerate(lines) if line.startswith("mcjax: point 1 of 2 done"))
    begun = next(index for index, line in enumerate(lines) if line.startswith("[point 2] "))
    assert ended < begun
