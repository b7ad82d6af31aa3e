"""How much of a run is kept: each level, a budget, and what is refused where rows are missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from track_fixtures import ARGUMENTS, fabricate, key_of

from mcjax.errors import ConfigError, RunError
from mcjax.track import table_file
from mcjax.track.digest import digest
from mcjax.track.levels import LEVELS, check_level, holds
from mcjax.track.recorder import TableRecorder
from mcjax.track.reduction import reduced
from mcjax.track.run import Run, load
from mcjax.track.schemas import SCHEMAS
from mcjax.track.sinks.base import RunInfo
from mcjax.track.sinks.files import Files
from mcjax.track.summary import summarise
from mcjax.track.tracker import Settings, Tracker


def kept(base: Path, level: str, overview: bool = False) -> Run:
    """A fabricated run, recorded and kept at a level as a real one is."""
    config = {"seed": 7, "track": {"level": level}}
    tracker = Tracker([Files(str(base), overview)], RunInfo("sim", 7, level, config))
    recorder = TableRecorder(key_of, level)
    assert tracker.directory is not None
    recorder.write_to(tracker.directory)
    tables = fabricate(recorder).tables()
    return tracker.finish(tables, {**summarise(tables, **ARGUMENTS), **recorder.kept()})


def figures(run: Run) -> dict[str, Any]:
    left_out = ("digest", "level", "bytes_by_transport", "peak_rss_bytes")  # `full` alone has transfer events
    return {name: value for name, value in run.summary.items() if name not in left_out}


def test_every_level_gives_the_same_figures(tmp_path: Path) -> None:
    runs = {level: kept(tmp_path, level) for level in LEVELS}
    assert figures(runs["full"]) == figures(runs["requests"]) == figures(runs["summary"])
    assert figures(runs["full"])["ttft_s"]["p50"] > 0
    assert runs["requests"].summary["digest"] == runs["summary"].summary["digest"] != runs["full"].summary["digest"]
    for level, run in runs.items():
        assert run.directory is not None
        again = load(run.directory)
        assert (again.level, again.record.level, run.level) == (level, level, level)
        assert again.summary == run.summary


def test_a_summary_has_no_tables_and_says_so(tmp_path: Path) -> None:
    handed = kept(tmp_path, "summary", overview=True)
    assert handed.directory is not None
    names = sorted(path.name for path in handed.directory.iterdir())
    assert names == sorted("DONE config.yaml environment.json run.json summary.json overview.png".split())
    for run in (handed, load(handed.directory)):
        asked = [
            lambda run=run: run.requests,
            lambda run=run: run.columns("events", "kind"),
            lambda run=run: run.tables,
        ]
        for table in asked:
            with pytest.raises(RunError, match=r"track\.level=summary.*no tables.*track\.level=requests"):
                table()
        with pytest.raises(RunError, match=r"track\.level=full"):
            run.request(2)


def test_a_killed_run_of_summaries_is_refused_like_any_other(tmp_path: Path) -> None:
    """Its rows are on disk while it goes on: memory does not grow with the run at this level either."""
    tracker = Tracker([Files(str(tmp_path))], RunInfo("sim", 7, "run"))
    recorder = TableRecorder(key_of, "summary")
    assert tracker.directory is not None
    recorder.write_to(tracker.directory)
    fabricate(recorder).tables()
    assert (tracker.directory / "requests.parquet").exists()
    with pytest.raises(RunError, match="unfinished"):
        load(tracker.directory)


def test_reduction_is_what_requests_records() -> None:
    whole, lower = fabricate().tables(), fabricate(TableRecorder(key_of, "requests")).tables()
    cut = {name: reduced(name, table) for name, table in whole.items()}
    assert digest(cut) == digest(lower) != digest(whole)
    assert {name: cut[name].schema for name in SCHEMAS} == {name: lower[name].schema for name in SCHEMAS}
    assert cut["outcomes"].num_rows == 0
    assert whole["events"].num_rows > lower["events"].num_rows > 0


def test_over_budget_what_requests_needs_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_file, "ROW_GROUP_BYTES", 1000)
    tracker = Tracker([Files(str(tmp_path))], RunInfo("sim", 7, "run"))
    recorder, unbounded = TableRecorder(key_of), TableRecorder(key_of)
    assert tracker.directory is not None
    recorder.write_to(tracker.directory, budget_bytes=20_000)
    for each in (recorder, unbounded):
        for index in range(50_000):
            each.event(index, "hit", index * 7919, "n0", tokens=index % 13)
        fabricate(each)
        for index in range(50_000):
            each.event(index, "hit", index, "n0")
    tables = recorder.tables()
    run = tracker.finish(tables, {**summarise(tables, **ARGUMENTS), **recorder.kept()})
    whole = unbounded.tables()
    assert run.requests.to_pylist() == whole["requests"].to_pylist()
    kinds = run.columns("events", "kind").to_pydict()["kind"]
    assert 0 < kinds.count("hit") < 50_000
    assert kinds.count("prefill_step") == 3
    assert run.reports.num_rows == 0
    assert run.decisions.to_pylist()[0]["names"] == []
    assert run.summary["digest"] == digest(whole)
    assert (run.level, run.record.level) == ("requests", "requests")
    assert run.record.cut == run.summary["cut"] == "its tables came to more than track.budget_bytes=20000"
    with pytest.raises(RunError, match=r"budget_bytes=20000.*again with track\.level=full, and more of a budget"):
        run.request(2)


def test_within_budget_nothing_is_lost(tmp_path: Path) -> None:
    recorder = TableRecorder(key_of)
    recorder.write_to(tmp_path, budget_bytes=10**9)
    tables = fabricate(recorder).tables()
    assert tables["reports"].num_rows == 2
    assert recorder.kept() == {"level": "full"}


def test_names_of_levels() -> None:
    assert holds("full", "requests")
    assert holds("summary", "summary")
    assert not holds("summary", "requests")
    with pytest.raises(
        ConfigError, match=r"track\.level=lean: is called requests now; allowed: summary, requests, full"
    ):
        check_level("lean")
    with pytest.raises(ConfigError, match=r"track\.budget_bytes=0"):
        Settings(budget_bytes=0)


def test_a_run_from_before_the_name_is_read() -> None:
    run = Run(None, {}, {"track": {"level": "lean"}}, {}, record=None)
    assert run.level == "requests"
