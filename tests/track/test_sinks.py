"""A tracker that raises, hangs or is slow hurts nobody; wandb gets what it should."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from track_fixtures import ARGUMENTS, fabricate

from mcjax.errors import ConfigError
from mcjax.track.run import load
from mcjax.track.sinks.base import RunInfo, Sink
from mcjax.track.sinks.files import Files
from mcjax.track.sinks.guard import Guarded
from mcjax.track.sinks.wandb import Wandb, flatten
from mcjax.track.summary import summarise
from mcjax.track.tracker import Tracker

INFO = RunInfo("sim", 7, "run", {"seed": 7})


class Listing:
    """Remembers its calls; `fails` and `hangs` name the call that goes wrong."""

    def __init__(self, fails: str = "", hangs: str = ""):
        self.calls: list[str] = []
        self.fails, self.hangs = fails, hangs
        self.release = threading.Event()
        self.entered = threading.Event()

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.hangs:
            self.entered.set()
            self.release.wait()
        if name == self.fails:
            raise SystemExit("tracker gave up")

    def start(self, info: RunInfo) -> None:
        self._called("start")

    def log(self, time_ns: int, metrics: Mapping[str, float]) -> None:
        self._called("log")

    def finish(self, summary: Mapping[str, Any], directory: Path | None) -> None:
        self._called("finish")


@pytest.fixture
def hanging() -> Iterator[Listing]:
    sink = Listing(hangs="log")
    yield sink
    sink.release.set()


def test_a_healthy_sink_gets_every_call_in_order() -> None:
    sink, warnings = Listing(), list[str]()
    guarded: Sink = Guarded(sink, warn=warnings.append)
    guarded.start(INFO)
    for tick in range(5):
        guarded.log(tick, {"x": 1.0})
    guarded.finish({}, None)
    assert sink.calls == ["start", *["log"] * 5, "finish"]
    assert not warnings


@pytest.mark.parametrize("fails", ["start", "log", "finish"])
def test_a_sink_that_raises_is_left_alone_after_one_warning(fails: str) -> None:
    sink, warnings = Listing(fails=fails), list[str]()
    guarded = Guarded(sink, warn=warnings.append)
    guarded.start(INFO)
    for tick in range(5):
        guarded.log(tick, {})
    guarded.finish({}, None)
    assert sink.calls.count(fails) == 1
    assert sink.calls[-1] == fails
    assert len(warnings) == 1
    assert "Listing" in warnings[0]
    assert "tracker gave up" in warnings[0]


def test_a_sink_that_hangs_delays_nothing_but_a_bounded_end(hanging: Listing) -> None:
    warnings: list[str] = []
    guarded = Guarded(hanging, timeout_s=0.1, queued_points=4, warn=warnings.append)
    guarded.start(INFO)
    guarded.log(0, {})
    assert hanging.entered.wait(10)
    for tick in range(100):
        guarded.log(tick, {})
    assert guarded.dropped == 96
    guarded.finish({}, None)
    assert len(warnings) == 1
    assert "0.1 s" in warnings[0]
    assert "finish" not in hanging.calls


def test_a_sink_that_hangs_at_the_end_is_given_up() -> None:
    sink, warnings = Listing(hangs="finish"), list[str]()
    guarded = Guarded(sink, timeout_s=0.1, warn=warnings.append)
    guarded.start(INFO)
    guarded.finish({}, None)
    sink.release.set()
    assert len(warnings) == 1


def test_points_dropped_by_a_slow_sink_are_counted(hanging: Listing) -> None:
    warnings: list[str] = []
    guarded = Guarded(hanging, queued_points=2, warn=warnings.append)
    guarded.start(INFO)
    guarded.log(0, {})
    assert hanging.entered.wait(10)
    for tick in range(5):
        guarded.log(tick, {})
    hanging.release.set()
    guarded.finish({}, None)
    assert hanging.calls[-1] == "finish"
    assert warnings == ["tracker Listing was too slow: 3 live points were dropped; the run itself is not affected"]


def test_bad_trackers_leave_a_whole_run(tmp_path: Path, hanging: Listing) -> None:
    sinks = [Listing(fails="start"), hanging, Listing(fails="finish"), Files(str(tmp_path))]
    tracker = Tracker(sinks, INFO, timeout_s=0.1)
    for tick in range(1000):
        tracker.log(tick, {"x": 1.0})
    tables = fabricate().tables()
    handed = tracker.finish(tables, summarise(tables, **ARGUMENTS))
    assert tracker.directory is not None
    assert load(tracker.directory).summary == handed.summary
    assert (tracker.directory / "overview.png").stat().st_size > 10_000


def test_a_picture_that_cannot_be_drawn_costs_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(run: Any) -> Any:
        raise ValueError("no such metric")

    monkeypatch.setattr("mcjax.track.plots.overview.overview", broken)
    tracker = Tracker([Files(str(tmp_path))], INFO)
    tables = fabricate().tables()
    tracker.finish(tables, summarise(tables, **ARGUMENTS))
    assert tracker.directory is not None
    assert (tracker.directory / "DONE").exists()
    assert "overview.png could not be drawn: ValueError('no such metric')" in caplog.text


class FakeRun:
    id = "abc"

    def __init__(self, place: Path):
        self.dir = str(place / "wandb" / "offline-run-1" / "files")
        self.logged: list[dict[str, float]] = []
        self.summary: dict[str, Any] = {}
        self.artifacts: list[Any] = []
        self.finished = False

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "time_s")

    def log(self, metrics: dict[str, float]) -> None:
        self.logged.append(metrics)

    def log_artifact(self, artifact: Any) -> None:
        self.artifacts.append(artifact)

    def finish(self) -> None:
        self.finished = True


class FakeArtifact:
    def __init__(self, name: str, type: str):
        self.files: list[str] = []

    def add_file(self, path: str, name: str) -> None:
        self.files.append(name)


@pytest.mark.parametrize(("key", "mode"), [("", "offline"), ("0123456789", "online")])
def test_wandb_gets_config_curves_summary_and_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str, mode: str
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", key)
    run, started = FakeRun(tmp_path), dict[str, Any]()

    def init(**arguments: Any) -> FakeRun:
        started.update(arguments)
        return run

    fake = SimpleNamespace(init=init, Settings=dict, Artifact=FakeArtifact)
    monkeypatch.setattr("mcjax.track.sinks.wandb._wandb", lambda: fake)
    directory = tmp_path / "run"
    directory.mkdir()
    for name in ("DONE", "summary.json", "events.parquet", "config.yaml"):
        (directory / name).touch()
    sink = Wandb(directory=str(tmp_path))
    sink.start(RunInfo("sim", 7, "run", {"seed": 7, "text": "key 0123456789"}))
    sink.log(1_500_000_000, {"running": 3})
    sink.finish({"ttft_s": {"p50": 0.1}, "backend": "sim"}, directory)
    assert started["mode"] == mode
    assert started["job_type"] == "sim"
    assert started["config"]["seed"] == 7
    assert started["config"]["text"] == ("key <redacted>" if key else "key 0123456789")
    assert run.logged == [{"time_s": 1.5, "running": 3}]
    assert run.summary == {"ttft_s/p50": 0.1, "backend": "sim"}
    assert run.artifacts[0].files == ["config.yaml", "events.parquet", "summary.json"]
    assert run.finished
    assert (f"wandb sync {tmp_path}" in capsys.readouterr().out) == (mode == "offline")


def test_wandb_modes_and_flat_names() -> None:
    with pytest.raises(ConfigError, match="auto, online, offline"):
        Wandb(mode="sometimes")
    assert flatten({"a": {"b": {"c": 1}}, "d": 2}) == {"a/b/c": 1, "d": 2}


@pytest.mark.slow
def test_wandb_offline_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    warnings: list[str] = []
    sink = Guarded(Wandb(directory=str(tmp_path)), warn=warnings.append)
    sink.start(INFO)
    sink.log(0, {"x": 1.0})
    (tmp_path / "summary.json").write_text("{}")
    sink.finish({"ttft_s": {"p50": 0.1}}, tmp_path)
    assert not warnings
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
