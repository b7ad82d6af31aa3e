"""`mcjax compare` on real simulated runs: what it marks, prints, writes and refuses."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest_app import BARE, SMALL, Answer, runs

import mcjax as package
from mcjax.app import compare
from mcjax.sched.base import PrefillChoice
from mcjax.sched.view import ClusterView
from mcjax.track.compare.bootstrap import ERROR, pairs_needed
from mcjax.track.compare.comparison import compare as compared
from mcjax.track.run import load
from mcjax.track.run_directory import RunDirectory
from mcjax.track.sweep import Point, Sweep
from mcjax.types import Request

Call = Callable[..., Answer]
BUSY = (*BARE, "workload.sessions=20", "workload.rate_per_s=8")


@pytest.fixture
def call(place: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """`mcjax compare` in this process."""

    def run(*arguments: str) -> Answer:
        capsys.readouterr()
        status = compare.command(list(arguments))
        captured = capsys.readouterr()
        return Answer(status, captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two selections, two seeds each."""
    base = tmp_path_factory.mktemp("made")
    for policy in ("random", "kvcache_centric"):
        for seed in (0, 1):
            package.run([*SMALL, f"track.sinks.0.directory={base}", f"sched/prefill={policy}", f"seed={seed}"])
    return base


@pytest.fixture
def kept(made: Path, place: Path) -> Path:
    """A working directory with these runs."""
    shutil.copytree(made, place / "runs")
    return place


def hardly_better(request: Request, view: ClusterView, rng: np.random.Generator) -> PrefillChoice:
    """Chance, but for one request in 500, which goes where the queue is shortest."""
    chance = int(rng.integers(len(view.queue_s)))
    return PrefillChoice(int(view.queue_s.argmin()) if rng.random() < 0.002 else chance)


@pytest.mark.check_long
def test_a_real_difference_is_marked_and_a_tiny_one_is_not(place: Path) -> None:
    """The power check on real runs: the same traffic for chance, for what is hardly better, and for a real policy."""
    seeds = range(pairs_needed(ERROR))
    chance = [package.run([*BUSY, "sched/prefill=random", f"seed={seed}"]) for seed in seeds]
    tiny = [package.run([*BUSY, f"seed={seed}"], prefill=hardly_better) for seed in seeds]
    real = [package.run([*BUSY, "sched/prefill=kvcache_centric", f"seed={seed}"]) for seed in seeds]
    names = ["ttft_s.mean", "ttft_s.p90", "prefix_hit_rate.token"]
    found = compared([*chance, *tiny], names)
    assert all(row.cells[0].mean != row.cells[1].mean for row in found.rows)
    assert not any(cell.best for row in found.rows for cell in row.cells)
    found = compared([*chance, *real], names)
    assert [[cell.best for cell in row.cells] for row in found.rows] == [[False, True]] * 3


def test_the_table(kept: Path, call: Call) -> None:
    answer = call("runs/*")
    assert (answer.status, answer.err) == (0, "")
    assert "sched/prefill" in answer.out
    assert "the same in all: " in answer.out
    assert "2 pairs are too few to mark anything as best: 6 are needed for 2 groups" in answer.out
    assert "*" not in answer.out
    assert call(*map(str, runs(kept))).out == answer.out


def test_formats_metrics_and_file(kept: Path, call: Call) -> None:
    answer = call("runs/*", "--format", "csv", "--metric", "ttft_s.p90,goodput_rps", "--metric", "tbt_s.p90")
    rows = list(csv.DictReader(io.StringIO(answer.out)))
    assert list(dict.fromkeys(row["metric"] for row in rows)) == [
        "ttft_s.p90",
        "goodput_rps",
        "requests.completed",
        "requests.rejected",
        "requests.failed",
        "tbt_s.p90",
    ]
    assert [row["sched/prefill"] for row in rows[:2]] == ["random", "kvcache_centric"]
    assert "differences are to prefill=random" in answer.err
    own = [run.summary["ttft_s"]["p90"] for run in map(load, runs(kept)[:2])]
    assert float(rows[0]["mean"]) == pytest.approx(sum(own) / 2)
    written = call("runs/*", "--format", "latex", "--out", "table.tex")
    assert (written.status, written.out) == (0, "")
    assert (kept / "table.tex").read_text() == call("runs/*", "--format", "latex").out
    assert call("runs/*", "--out", "none/table.tex").err.startswith("mcjax: --out=none/table.tex: cannot be written")


def test_baseline_and_tenants(kept: Path, call: Call) -> None:
    answer = call("runs/*", "--baseline", "kvcache_centric", "--by", "tenant", "--metric", "ttft_s.mean")
    assert "differences are to prefill=kvcache_centric" in answer.out
    assert [line for line in answer.out.splitlines() if line.startswith("tenant")] == [
        "tenant batch",
        "tenant interactive",
    ]
    assert call("runs/*", "--baseline", "3").err == (
        "mcjax: baseline=3: names 0 groups; allowed: 1 (prefill=random), 2 (prefill=kvcache_centric)\n"
    )


def test_what_is_unfinished_failed_or_damaged_is_listed(kept: Path, call: Call) -> None:
    RunDirectory.create(kept / "runs", "2099-killed")
    RunDirectory.create(kept / "runs", "2099-failed").failed("out of memory")
    damaged = runs(kept)[0]
    (damaged / "summary.json").write_text("{")
    answer = call("runs/*")
    assert answer.status == 0
    refused = [line for line in answer.out.replace("\n", " ").split("refused: ") if line.startswith("runs/")]
    assert len(refused) == 3
    assert "damaged" in refused[0]
    assert "out of memory" in refused[1]
    assert "unfinished" in refused[2]
    nothing = call("runs/2099*")
    assert nothing.status == 2
    assert "there is no run to compare" in nothing.err
    assert "runs/2099-failed: the run failed before it had tables: out of memory" in nothing.err


def test_interrupted_runs_only_with_partial(kept: Path, call: Call) -> None:
    early = runs(kept)[0]
    (early / "DONE").unlink()
    (early / "FAILED").write_text("interrupted\n")
    assert f"refused: {early.relative_to(kept)}: failed: interrupted" in call("runs/*").out.replace("\n", " ")
    taken = call("runs/*", "--partial").out
    assert "refused" not in taken
    assert "ended early, and taken all the same" in taken


def test_a_sweep_lists_the_points_it_lacks(kept: Path, call: Call) -> None:
    points = [Point((f"seed={at}",), directory=run.name, state="done") for at, run in enumerate(runs(kept))]
    points.append(Point(("seed=9", "sched/prefill=random"), state="failed", reason="no memory"))
    Sweep(kept / "runs/sweeps/mine", points=points).write()
    answer = call("mine")
    assert answer.status == 0
    assert "refused: seed=9 sched/prefill=random: failed in mine no memory" in answer.out.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("runs/none",), "runs/none: no such run"),
        (("runs/*", "--metric", "godput_rps"), "did you mean goodput_rps"),
        (("runs/*", "--by", "tenants"), "by=tenants: no column of requests.parquet"),
        (("runs/*", "--resamples", "1"), "resamples=1: too few"),
    ],
)
def test_mistakes_are_one_line(kept: Path, call: Call, arguments: tuple[str, ...], message: str) -> None:
    answer = call(*arguments)
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.startswith("mcjax: ")
    assert answer.err.count("\n") == 1
    assert message in answer.err
