"""The sinks of a run together: what they are told, and that bad ones leave a whole run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sink_fixtures import CALLS, INFO, Listing
from track_fixtures import ARGUMENTS, fabricate

from mcjax.track.run import Run, load
from mcjax.track.sinks.base import RunInfo, Sink
from mcjax.track.sinks.files import Files
from mcjax.track.summary import summarise
from mcjax.track.tracker import Tracker


def played(sinks: list[Sink], info: RunInfo = INFO, timeout_s: float = 60.0) -> Run:
    tracker = Tracker(sinks, info, timeout_s)
    for tick in range(100):
        tracker.log(tick, {"x": 1.0})
    tables = fabricate().tables()
    return tracker.finish(tables, summarise(tables, **ARGUMENTS))


def test_bad_trackers_leave_a_whole_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hang = [Listing(hangs=call) for call in CALLS]
    bad = [*hang, *(Listing(fails=call) for call in CALLS)]
    run = played([*bad, Files(str(tmp_path))], timeout_s=0.2)
    for sink in hang:
        sink.release.set()
    assert run.directory is not None
    again = load(run.directory)
    assert again.summary == run.summary
    assert again.summary["digest"] == played([]).summary["digest"]
    assert (run.directory / "overview.png").stat().st_size > 10_000
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == len(bad)
    assert sum("did not finish within 0.2 s" in warning for warning in warned) == 3


def test_sinks_are_told_who_runs_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "hunter2-key")
    sink = Listing()
    info = RunInfo("sim", 7, "", {"text": "is hunter2-key"}, {"argv": ["hunter2-key"]}, sources={"a.py": "hunter2-key"})
    run = played([sink, Files(str(tmp_path), overview=False)], info)
    (told,), (summary, directory) = sink.told[0], sink.told[-1]
    assert run.directory is not None
    assert (told.name, told.directory, directory) == (run.directory.name, run.directory, run.directory)
    assert told.config == {"text": "is <redacted>"}
    assert "hunter2" not in repr(told)
    assert summary == run.summary


def test_without_a_directory_sinks_are_told_so() -> None:
    sink = Listing()
    played([sink])
    assert sink.told[0][0].directory is None
    assert sink.told[0][0].name == "run"
    assert sink.told[-1][1] is None


def test_ctrl_c_while_a_sink_hangs_ends_only_the_waiting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Pressed(Listing):
        """Hangs in `finish`, and then Ctrl-C comes."""

        def finish(self, summary: Mapping[str, Any], directory: Path | None) -> None:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            super().finish(summary, directory)

    sink, healthy = Pressed(hangs="finish"), Listing()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run = played([sink, healthy, Files(str(tmp_path), overview=False)])
    finally:
        signal.signal(signal.SIGINT, before)
        sink.release.set()
    assert run.directory is not None
    assert load(run.directory).state == "done"
    assert "tracker Pressed was interrupted; its log is incomplete" in caplog.text
    assert healthy.calls[-1] == "finish"


def test_a_picture_that_cannot_be_drawn_costs_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(run: Any) -> Any:
        raise ValueError("no such metric")

    monkeypatch.setattr("mcjax.track.plots.overview.overview", broken)
    run = played([Files(str(tmp_path))])
    assert run.directory is not None
    assert (run.directory / "DONE").exists()
    assert "overview.png could not be drawn: ValueError('no such metric')" in caplog.text
