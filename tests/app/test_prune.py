"""What `mcjax prune` lists, what it removes, and what it never touches."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from mcjax import load
from mcjax.app import prune
from mcjax.errors import RunError
from mcjax.track import record, sweep
from mcjax.track.levels import FULL
from mcjax.track.prune import Rules, chosen, entries, remove
from mcjax.track.record import RunRecord
from mcjax.track.recorder import TableRecorder
from mcjax.track.run import Run
from mcjax.track.run_directory import RunDirectory
from mcjax.track.sinks.base import RunInfo
from mcjax.track.sinks.files import Files
from mcjax.track.summary import summarise
from mcjax.track.tracker import Tracker
from mcjax.types import Request, RequestRow, RequestState

DAY_S = 86_400
NOW = datetime(2026, 6, 30, 12, tzinfo=UTC)


def make(base: Path, name: str, days: float = 0, state: str = "done", key: str = "", **fields: str) -> Path:
    """A small real run directory that ended so many days ago."""
    tracker = Tracker([Files(str(base), overview=False)], RunInfo("sim", 1, name, {"seed": 1}, record=RunRecord(key)))
    assert tracker.directory is not None
    if state in ("running", "killed"):
        marker = {"pid": os.getpid() if state == "running" else 2**22 + 1, "host": os.uname().nodename}
        (tracker.directory / "RUNNING").write_text(json.dumps(marker))
    else:
        recorder = TableRecorder(lambda block: b"")
        made = RequestRow(Request(1, 0, 10, 4), state=RequestState.COMPLETED)
        made.token_ends_ns = [np.array([5, 9], np.int64)]
        recorder.request(made)
        arguments = {"wall_s": 1.0, "duration_ns": 10**9, "warmup_ns": 0, "block_tokens": 16}
        summary = summarise(recorder.tables(), backend="sim", seed=1, **arguments)
        tracker.finish(recorder.tables(), summary, "interrupted" if state == "failed" else "")
    directory = RunDirectory(tracker.directory)
    ended = (NOW - timedelta(days=days)).isoformat(timespec="seconds")
    directory.write_record(replace(record.read(directory.path), started=ended, ended=ended, **fields))
    return directory.path


def going(base: Path, **rules: object) -> list[str]:
    now_s = NOW.timestamp()
    return [entry.directory.name for entry in chosen(entries(base), Rules(**rules), now_s)]  # type: ignore[arg-type]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Six runs, and what else may lie beside them."""
    base = tmp_path / "runs"
    make(base, "old", 40)
    make(base, "failed", 20, "failed")
    make(base, "killed", 10, "killed")
    make(base, "twice", 6, key="abc")
    make(base, "twice-again", 5, key="abc")
    make(base, "running", 90, "running")
    (base / "wandb").mkdir()
    (base / "notes").mkdir()
    (base / "notes" / "DONE.txt").touch()
    elsewhere = make(tmp_path / "other", "elsewhere", 90)
    (base / "link").symlink_to(elsewhere)
    return base


def test_conditions(base: Path) -> None:
    assert going(base, states=["failed"]) == ["failed"]
    assert going(base, states=["killed", "failed"]) == ["failed", "killed"]
    assert going(base, older_than_s=15 * DAY_S) == ["old", "failed"]
    assert going(base, older_than_s=15 * DAY_S, states=["done"]) == ["old"]
    assert going(base, superseded=True) == ["twice"]
    assert going(base) == ["old", "failed", "killed", "twice", "twice-again"]
    assert going(base, keep=2) == ["old", "failed", "killed"]
    assert going(base, keep=1, states=["done"]) == ["old", "twice"]
    assert going(base, keep=9) == []


def test_a_budget_takes_the_oldest_first(base: Path) -> None:
    sizes = {entry.directory.name: entry.nbytes for entry in entries(base)}
    everything = sum(sizes.values())
    assert going(base, budget_bytes=everything) == []
    assert going(base, budget_bytes=everything - 1) == ["old"]
    assert going(base, budget_bytes=everything - sizes["old"] - 1) == ["old", "failed"]
    assert going(base, budget_bytes=0, states=["killed"]) == ["killed"]
    assert sizes["old"] == sum(path.stat().st_size for path in (base / "old").iterdir())


def test_a_newer_run_that_holds_less_supersedes_nothing(tmp_path: Path) -> None:
    for name, days, level in (("whole", 3, FULL), ("less", 2, "summary"), ("least", 1, "summary")):
        make(tmp_path, name, days, key="k", level=level)
    make(tmp_path, "no-key", 9)
    make(tmp_path, "no-key-2", 8)
    assert going(tmp_path, superseded=True) == ["less"]


def test_what_may_be_running_stays(tmp_path: Path) -> None:
    make(tmp_path, "here", 90, "running")
    away = make(tmp_path, "away", 90, "killed")
    (away / "RUNNING").write_text(json.dumps({"pid": 2**22 + 1, "host": "another-host"}))
    assert going(tmp_path) == []


def test_runs_of_sweeps_stay_unless_asked_for(tmp_path: Path) -> None:
    make(tmp_path, "named", 5)
    make(tmp_path, "told", 4, sweep="s1")
    make(tmp_path, "free", 3)
    points = [sweep.Point(("seed=1",), directory="named", state=sweep.CACHED)]
    sweep.Sweep(tmp_path / sweep.FOLDER / "s1", points=points).write()
    assert going(tmp_path) == ["free"]
    assert going(tmp_path, sweeps=True) == ["named", "told", "free"]
    (tmp_path / sweep.FOLDER / "s1" / sweep.FILE).write_text("{")
    with pytest.raises(RunError, match=r"s1: sweep\.json is damaged"):
        entries(tmp_path)


def test_it_lists_before_it_removes(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.name for path in base.iterdir())
    wish = ["--runs", str(base), "--state", "failed,killed"]
    assert prune.command(wish) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[4:] for line in listed[:-1]] == [
        ["failed", str(base / "failed")],
        ["killed", str(base / "killed")],
    ]
    assert listed[-1].startswith("2 of 6 runs, ")
    assert listed[-1].endswith(" would go; --yes removes them")
    assert sorted(path.name for path in base.iterdir()) == before
    assert prune.command([*wish, "--yes"]) == 0
    assert capsys.readouterr().out.startswith("2 of 6 runs, ")
    assert sorted(path.name for path in base.iterdir()) == [name for name in before if name not in ("failed", "killed")]


def test_everything_else_survives_everything(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outside = (base / "link").resolve()
    (base / "old" / "away").symlink_to(outside)
    assert prune.command(["--runs", str(base), "--keep", "0", "--sweeps", "--yes"]) == 0
    assert "5 of 6 runs" in capsys.readouterr().out
    assert sorted(path.name for path in base.iterdir()) == ["link", "notes", "running", "wandb"]
    assert isinstance(load(outside), Run)
    assert (base / "notes" / "DONE.txt").exists()


def test_only_tables(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(Path(__file__).parents[1] / "track" / "data" / "run_v1", base / "first-version")
    whole = load(base / "old")
    assert isinstance(whole, Run)
    wish = ["--runs", str(base), "--keep", "0", "--tables", "--yes"]
    assert prune.command(wish) == 0
    assert capsys.readouterr().out.startswith("the tables of 5 of 7 runs, ")
    for name in ("old", "failed", "first-version"):
        assert not list((base / name).glob("*.parquet"))
        run = load(base / name)
        assert isinstance(run, Run)
        assert run.level == "summary"
        with pytest.raises(RunError, match=r"track\.level=summary"):
            _ = run.requests
    again = load(base / "old")
    assert isinstance(again, Run)
    assert again.record.level == "summary"
    assert {**again.summary, "level": ""} == {**whole.summary, "level": ""}
    assert prune.command(wish) == 0
    assert "the tables of 0 of 7 runs, 0 B" in capsys.readouterr().out


def test_a_run_that_changed_since_it_was_looked_at_stays(base: Path) -> None:
    entry = next(entry for entry in entries(base) if entry.directory.name == "old")
    os.replace(base / "old" / "DONE", base / "old" / "RUNNING")
    with pytest.raises(RunError, match="is not done any more, and stays"):
        remove(entry)
    assert (base / "old" / "summary.json").exists()


def test_what_a_killed_prune_left_goes(base: Path) -> None:
    os.rename(base / "old", base / ".old.pruned")
    assert prune.command(["--runs", str(base), "--keep", "99", "--yes"]) == 0
    assert not (base / ".old.pruned").exists()


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ([], "says nothing of which runs may go"),
        (
            ["--state", "running"],
            r"--state=running: no such state, or one whose runs stay; allowed: killed, failed, done",
        ),
        (["--older-than", "30"], "--older-than=30: must be a number and a unit; allowed: s, m, h, d, w"),
        (["--budget", "10G"], "--budget=10G: must be a number and a unit; allowed: B, kB"),
        (["--keep", "-1"], "--keep=-1: must be 0 or more"),
        (["--keep", "1", "--runs", "nowhere"], "nowhere: no such folder"),
    ],
)
def test_mistakes(base: Path, capsys: pytest.CaptureFixture[str], wish: list[str], message: str) -> None:
    assert prune.command(["--runs", str(base), *wish]) == 2
    assert message in capsys.readouterr().err
