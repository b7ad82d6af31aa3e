"""Sweeps on the command line: what becomes of each point, of the worker processes, and after Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest_app import BARE, SMALL, Answer, runs
from sweep_fixtures import POLICIES, alive, read_until, running, start, states, sweeps, workers

import mcjax as package
from mcjax.app.sweep.results import kind_of, results_of
from mcjax.track.run import load
from mcjax.track.sweep import Sweep

Command = Callable[..., Answer]
OWN = ("sched/prefill=custom", "hydra.launcher.workers=2")


@pytest.fixture
def policies(place: Path) -> Path:
    (place / "policies.py").write_text(POLICIES)
    return place


def own(*names: str) -> list[str]:
    return [*OWN, "sched.prefill._target_=" + ",".join(f"policies.{name}" for name in names)]


def test_points_that_fail_or_die_are_told_and_stop_no_other(mcjax: Command, policies: Path) -> None:
    answer = mcjax("-m", *SMALL, *own("Shortest", "Broken", "Exits", "Killed", "Tells"))
    assert answer.status == 1
    told = answer.err[answer.err.index("mcjax: 3 of the sweep's 5 points failed:") :]
    for name, reason in {
        "Broken": 'return {}["missing"]',
        "Exits": "its process ended by itself with status 3\n    so long",
        "Killed": "its process was ended by SIGKILL (out of memory?)",
    }.items():
        assert f"sched.prefill._target_=policies.{name}: " in told
        assert reason in told
    assert "Traceback" not in told.replace("Traceback (most recent call last)", "", 1), "one of our internals is shown"
    (sweep,) = sweeps(policies)
    assert states(sweep) == ["done", "failed", "failed", "failed", "done"]
    assert sweep.ended
    left = {point.directory: point.state for point in sweep.points}
    assert sorted(path.name for path in runs(policies)) == sorted(left)
    assert len(running(policies)) == 2, "those whose process died"
    good = [load(policies / "runs" / point.directory) for point in sweep.points if point.state == "done"]
    assert [run.record.sweep for run in good] == [sweep.name] * 2
    assert good[0].record.argv[1:] == sweep.points[0].overrides, "which repeats this point alone"


@pytest.mark.check_long
def test_only_the_parent_prints(mcjax: Command, policies: Path) -> None:
    answer = mcjax("-m", *SMALL, *own("Tells"), "hydra.launcher.workers=1", "+seeds=2")
    assert answer.status == 0, answer.err
    said = [line for line in answer.out.splitlines() if "played by" in line]
    assert [line.partition(" played")[0] for line in said] == ["[point 1]", "[point 2]"]
    assert len({line.partition("] ")[2] for line in said}) == 1, "one process played them all"
    ended = [line for line in answer.out.splitlines() if line.startswith("mcjax: point ")]
    assert [line.rpartition(": ")[2] for line in ended] == ["seed=0", "seed=1"]
    assert answer.out.splitlines()[-1].startswith("sweep directory: runs/sweeps/")
    assert answer.out.rstrip().endswith("(2 done)")
    assert not list(policies.glob("*.yaml")), "nothing else is left lying about"


def test_nothing_runs_if_a_point_cannot_be_made(mcjax: Command, place: Path) -> None:
    for words in (["sched/prefill=random,ranom"], ["seed=1,2", "hydra.launcher.workers=0"]):
        answer = mcjax("-m", *SMALL, *words)
        assert answer.status == 2
        assert "ranom" in answer.err or "hydra.launcher.workers=0: must be a whole number" in answer.err
        assert not runs(place)


@pytest.mark.check_long
def test_a_written_down_study_ends_with_a_table_and_a_picture(mcjax: Command, place: Path, trace: Path) -> None:
    words = ["experiment=prefill_selections", "cluster=2p2d", "track.sinks.0.overview=false"]
    answer = mcjax(*words, f"workload.path={trace}", "sched/prefill=random,least_loaded")
    assert answer.status == 0, answer.err
    assert answer.err == ""
    (sweep,) = sweeps(place)
    assert sweep.question == "Which prefill selection serves this trace best?"
    for text in (answer.out, (sweep.directory / "table.md").read_text()):
        assert "differences are to prefill=random" in text
    assert (sweep.directory / "pareto.pdf").read_bytes().startswith(b"%PDF")
    assert "ttft_s.p90" in (sweep.directory / "pareto.csv").read_text()
    assert f"next: mcjax compare {sweep.name}, mcjax report {sweep.name}" in answer.out


@pytest.mark.check_long
def test_the_picture_is_of_what_was_swept(place: Path) -> None:
    def runs_of(*words: str) -> package.Runs:
        return package.Runs([package.run([*BARE, word]) for word in words])

    assert kind_of(runs_of("workload.rate_per_s=1", "workload.rate_per_s=2.5")) == "goodput"
    assert kind_of(runs_of("sched/prefill=random", "sched/prefill=least_loaded")) == "pareto"
    assert kind_of(runs_of("seed=1", "seed=2")) == "pareto"


def test_what_cannot_be_kept_at_the_end_costs_no_run(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = package.run(SMALL)
    (place / "file").touch()
    results = results_of(package.Runs([run], [], Sweep(place / "file" / "where no directory can be")))
    assert "TTFT p90" in results.table
    assert results.files == []
    told = [record.getMessage() for record in caplog.records]
    assert ["could not be compared" in told[0], "could not be drawn" in told[1]] == [True] * 2


@pytest.mark.check_long
def test_batches_are_one_sweep_and_one_that_keeps_nothing_says_so(mcjax: Command, place: Path) -> None:
    answer = mcjax("-m", *BARE, "seed=1,2", "hydra.sweeper.max_batch_size=1")
    assert answer.status == 0, answer.err
    assert answer.out.splitlines()[-1] == "sweep: 2 done; nothing of it is kept on disk"
    assert not (place / "runs").exists()


@pytest.mark.check_long
def test_ctrl_c_keeps_what_there_is(policies: Path) -> None:
    process = start(policies, "-m", *SMALL, *own("Shortest", "WaitsAtOnce"))
    read_until(process, "point 1 of 2 done", "[point 2] waits")
    players = workers(policies)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "mcjax: interrupted; of the sweep's 2 points are missing: 1; the same command goes on" in err
    assert "Traceback" not in err
    assert "(1 done, 1 interrupted)" in out
    assert not any(map(alive, players))
    (sweep,) = sweeps(policies)
    assert states(sweep) == ["done", "interrupted"]
    partial = load(policies / "runs" / sweep.points[1].directory)
    assert (partial.state, partial.reason) == ("failed", "interrupted")
    assert partial.decisions.num_rows >= 2


@pytest.mark.check_long
def test_a_second_ctrl_c_kills_and_points_that_wait_never_begin(policies: Path) -> None:
    # It says so inside the `try`: the key that is pressed on hearing it cannot fall before.
    stubborn = "\nclass Stubborn(Shortest):\n    def choose(self, request, view, rng):\n        while True:\n"
    stubborn += "            try:\n                print('never', flush=True)\n                time.sleep(60)\n"
    stubborn += "            except KeyboardInterrupt:\n                print('not now', flush=True)\n"
    (policies / "policies.py").write_text(POLICIES + stubborn)
    process = start(policies, "-m", *SMALL, *own("Stubborn"), "hydra.launcher.workers=1", "+seeds=3")
    read_until(process, "[point 1] never")
    (player,) = workers(policies)
    process.send_signal(signal.SIGINT)
    read_until(process, "[point 1] not now")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert not alive(player)
    (sweep,) = sweeps(policies)
    assert [point.reason for point in sweep.points] == ["killed", *["interrupted before it began"] * 2]
