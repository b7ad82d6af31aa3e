"""`mcjax plot`: pictures and numbers of real simulated runs, and how it refuses."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest_app import SIM
from figures_fixtures import SELECTIONS

import mcjax
from mcjax.app import plot
from mcjax.track.plots.kinds import KINDS
from mcjax.track.runs import Runs
from mcjax.track.sweep import Sweep

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(drawn_sweep: Sweep, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """The command in the directory where `runs` lies."""
    monkeypatch.chdir(drawn_sweep.base.parent)

    def command(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = plot.command(words)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return command


def test_every_kind_of_a_real_sweep(call: Call, tmp_path: Path) -> None:
    status, out, err = call("selections", f"kind={','.join(KINDS)}", f"out={tmp_path}/fig.svg")
    assert status == 0, err
    assert out.splitlines() == [f"{tmp_path}/fig_{kind}.{suffix}" for kind in KINDS for suffix in ("svg", "csv")]
    for kind in KINDS:
        head, *rows = csv.reader((tmp_path / f"fig_{kind}.csv").read_text().splitlines())
        assert len(rows) > 1
        assert {len(row) for row in rows} == {len(head)}
        group = head.index("group")
        assert {row[group] for row in rows} == set(SELECTIONS)
    assert "not drawn: 1 point of the sweep that did not finish" in err


def test_what_it_writes_is_what_the_notebook_draws(call: Call, tmp_path: Path, drawn_sweep: Sweep) -> None:
    status, _, err = call(
        str(drawn_sweep.base / "2*"), "kind=goodput", f"out={tmp_path}/fig.png", "dpi=100", "width=page"
    )
    assert status == 0, err
    runs = mcjax.load("selections")
    assert isinstance(runs, Runs)
    assert (tmp_path / "fig.csv").read_text() == runs.plot("goodput").csv()
    mean = sum(run.summary["goodput_rps"] for run in runs[:3]) / 3
    (row, *_) = csv.DictReader((tmp_path / "fig.csv").read_text().splitlines())
    assert float(row["goodput_rps"]) == pytest.approx(mean)
    assert row["repetitions"] == "3"


def test_one_run_in_memory_draws_every_kind() -> None:
    run = mcjax.run([*SIM, "workload.sessions=6", "track=none", "cluster=2m"], progress=False)
    for kind in KINDS:
        assert run.plot(kind).png().startswith(b"\x89PNG")
    found = run.plot("timeline").data.to_pylist()
    busy_s = sum((row["end_s"] - row["begin_s"]) * row["busy"] for row in found if row["phase"] == "prefill")
    assert busy_s == pytest.approx(run.summary["prefill_busy_s"], rel=1e-6)


def test_default_names_and_folders(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, _ = call("selections", "kind=pareto,goodput", f"out={tmp_path}/figures")
    assert status == 0
    assert [Path(line).name for line in out.splitlines()] == ["pareto.pdf", "pareto.csv", "goodput.pdf", "goodput.csv"]
    assert plot.paths_of("", ["pareto"]) == [Path("pareto.pdf")]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("selections", "kind=ttft"), "kind=ttft: no such kind, did you mean ttft_cdf; allowed: ttft_cdf, tbt_cdf"),
        (("selections",), "kind=: which figure is it to be; allowed: ttft_cdf"),
        (("selections", "kind=pareto", "widht=page"), "kind=pareto takes no widht, did you mean width"),
        (("selections", "kind=pareto", "out=fig.jpg"), "out=fig.jpg: its suffix says what is written"),
        (("selections", "kind=pareto", "dpi=many"), "dpi=many: must be 50 to 1200"),
        (("selections", "kind=pareto", "kind=load"), "kind=load: is there twice"),
        (("kind=pareto",), "name at least one run or sweep"),
        (("nowhere", "kind=pareto"), "nowhere: no such run"),
        (("selections", "kind=pareto", "x=ttft_s.p91"), "x=ttft_s.p91: no such metric, did you mean ttft_s.p9"),
    ],
)
def test_refusals(call: Call, words: tuple[str, ...], problem: str) -> None:
    status, out, err = call(*words)
    assert (status, out) == (2, "")
    assert err.startswith("mcjax: ")
    assert problem in err


def test_a_killed_run_is_refused_with_its_reason(call: Call, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "RUNNING").write_text(json.dumps({"host": "elsewhere", "pid": 1}))
    status, _, err = call(str(killed), "kind=load")
    assert status == 2
    assert "running or killed: process 1 on elsewhere" in err
    status, _, err = call(str(killed), "selections", "kind=goodput", f"out={tmp_path}/fig.png")
    assert status == 0
    assert "not drawn: 1 run that could not be read" in err
