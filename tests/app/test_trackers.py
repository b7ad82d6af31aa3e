"""Trackers through the command line: the user's own, good and bad, and what is not installed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest_app import SIM, Answer, runs

import mcjax as package
from mcjax.app.runner import live_figures
from mcjax.track.console import Figures

Command = Callable[..., Answer]
SMALL = (*SIM, "workload.sessions=2", "track.sinks.0.overview=false")

SINKS = '''
import json, os, signal, sys, threading

class Mine:
    """Writes down what it is told."""
    def __init__(self, path, note=""):
        self.path, self.note, self.points = path, note, 0
    def start(self, info):
        self.info = info
    def log(self, time_ns, metrics):
        self.points, self.last = self.points + 1, dict(metrics)
    def finish(self, summary, directory):
        told = {"name": self.info.name, "backend": self.info.backend, "seed": self.info.config["seed"],
                "points": self.points, "last": self.last, "completed": summary["requests"]["completed"],
                "done": (directory / "DONE").exists(), "note": self.note}
        open(self.path, "w").write(json.dumps(told))

class Bad:
    """Goes wrong in one call: raises, exits, hangs, or hangs until Ctrl-C."""
    def __init__(self, call, how):
        self.call, self.how = call, how
    def _called(self, name):
        if name == self.call:
            if self.how == "raises":
                raise ValueError("no luck")
            if self.how == "exits":
                sys.exit(3)
            if self.how == "imports":
                import surely_no_such_package
            if self.how == "interrupted":
                os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait()
    def start(self, info):
        self._called("start")
    def log(self, time_ns, metrics):
        self._called("log")
    def finish(self, summary, directory):
        self._called("finish")

class Refuses:
    def __init__(self):
        raise ValueError("no such account")
'''
FILES = "{_target_: mcjax.track.sinks.files.Files, overview: false}"


@pytest.fixture(autouse=True)
def my_sinks(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "my_sinks.py").write_text(SINKS)
    monkeypatch.delitem(sys.modules, "my_sinks", raising=False)


def test_a_sink_of_ones_own(mcjax: Command, place: Path) -> None:
    own = "{_target_: my_sinks.Mine, path: told.json, note: hello}"
    answer = mcjax(*SIM, "workload.sessions=6", f"track.sinks=[{FILES}, {own}]")
    assert answer.status == 0, answer.err
    told = json.loads((place / "told.json").read_text())
    (directory,) = runs(place)
    run = package.load(directory)
    assert isinstance(run, package.Run)
    assert (told["name"], told["backend"], told["seed"]) == (directory.name, "sim", 0)
    assert told["completed"] == run.summary["requests"]["completed"] > 0
    assert told["done"]
    assert told["note"] == "hello"
    assert told["points"] >= 1
    assert {"submitted", "completed", "running", "not_served", "output_tokens_per_s"} <= set(told["last"])
    assert told["last"]["prefix_hit_rate"] > 0


def test_bad_trackers_hurt_no_run(mcjax: Command, place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All ways of going wrong in all calls, together beside one run, which ends like one without them."""
    assert mcjax(*SMALL).status == 0
    calls, ways = ("start", "log", "finish"), ("raises", "exits", "imports", "hangs")
    bad = [f"{{_target_: my_sinks.Bad, call: {call}, how: {how}}}" for call in calls for how in ways]
    sinks = ", ".join([FILES, *bad])
    answer = mcjax(*SIM, "workload.sessions=2", f"track.sinks=[{sinks}]", "track.finish_timeout_s=0.5")
    assert answer.status == 0, answer.err
    good, other = (package.load(directory) for directory in runs(place))
    assert isinstance(good, package.Run)
    assert isinstance(other, package.Run)
    assert other.state == "done"
    assert other.summary["digest"] == good.summary["digest"]
    problems = ("ValueError: no luck", "SystemExit: 3", "surely_no_such_package", "did not finish within 0.5 s")
    for problem in problems:
        assert sum(problem in message for message in caplog.messages) == len(calls), problem
    assert len(caplog.messages) == len(bad)
    assert not answer.err


@pytest.mark.check_long
def test_ctrl_c_while_a_tracker_hangs(fresh: Command, place: Path) -> None:
    bad = "{_target_: my_sinks.Bad, call: finish, how: interrupted}"
    answer = fresh(*SIM, "workload.sessions=2", f"track.sinks=[{FILES}, {bad}]")
    assert answer.status == 0, answer.err
    assert "tracker Bad was interrupted; its log is incomplete; the run itself is not affected" in answer.err
    (directory,) = runs(place)
    assert (directory / "DONE").exists()
    assert not (directory / "FAILED").exists()


def test_a_tracker_that_cannot_be_made_is_told_before_anything_runs(mcjax: Command, place: Path) -> None:
    answer = mcjax(*SIM, "track.sinks=[{_target_: my_sinks.Refuses}]")
    assert answer.status == 1
    assert answer.err.endswith("ValueError: no such account\n")
    assert not runs(place)


def test_files_first_wandb_beside(mcjax: Command, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_DATA_DIR", str(place / "home"))
    answer = mcjax(*SMALL, "track=wandb")
    assert answer.status == 0, answer.err
    (offline,) = (place / "runs" / "wandb").glob("offline-run-*")
    assert f"wandb sync {offline.relative_to(place)}" in answer.out
    assert [directory.name for directory in runs(place) if (directory / "DONE").exists()]


def test_live_figures() -> None:
    figures = Figures(now_ns=3_000_000_000, submitted=9, completed=6, running=2, not_served=1, output_tokens=500)
    live = live_figures(figures, before=(1_000_000_000, 100))
    assert live == {
        "submitted": 9,
        "completed": 6,
        "running": 2,
        "not_served": 1,
        "output_tokens": 500,
        "output_tokens_per_s": 200,
    }
    figures.prompt_tokens, figures.hit_tokens = 100, 25
    again = live_figures(figures, before=(3_000_000_000, 500))
    assert again["prefix_hit_rate"] == 0.25
    assert "output_tokens_per_s" not in again
