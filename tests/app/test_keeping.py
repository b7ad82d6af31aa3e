"""`track.level` and `track.budget_bytes` through the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest_app import SMALL, Answer, runs

import mcjax as package
from mcjax.errors import RunError
from mcjax.track import table_file
from mcjax.track.run import Run, load

Command = Callable[..., Answer]


def only(place: Path) -> Run:
    (directory,) = runs(place)
    return load(directory)


def test_a_summary_is_compared_but_has_no_tables(mcjax: Command, place: Path) -> None:
    assert mcjax(*SMALL, "track.level=summary").status == 0
    run = only(place)
    assert run.directory is not None
    assert not list(run.directory.glob("*.parquet*"))
    assert run.summary["requests"]["completed"] > 0
    assert run.record.headline["ttft_s.mean"] == run.summary["ttft_s"]["mean"] > 0
    with pytest.raises(RunError, match=r"track\.level=summary"):
        _ = run.requests


def test_a_run_of_requests_is_not_replayed(mcjax: Command, place: Path) -> None:
    assert mcjax(*SMALL, "track.level=requests").status == 0
    with pytest.raises(RunError, match=r"track\.level=requests: a replay needs every row; .*track\.level=full"):
        package.replay(only(place))


def test_a_budget_reaches_the_recorder(mcjax: Command, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_file, "ROW_GROUP_BYTES", 1000)
    assert mcjax(*SMALL, "track.budget_bytes=1000").status == 0
    run = only(place)
    assert (run.level, run.record.level) == ("requests", "requests")
    assert run.record.cut.endswith("track.budget_bytes=1000")
    with pytest.raises(RunError, match=r"budget_bytes=1000"):
        run.request(0)


def test_the_check_world_keeps_summaries_too(mcjax: Command, place: Path) -> None:
    answer = mcjax("backend=check", "backend.schedules=2", "track.level=summary", "track.sinks.0.overview=false")
    assert answer.status == 0, answer.err
    assert only(place).level == "summary"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("track.level=lean", "track.level=lean: is called requests now; allowed: summary, requests, full"),
        ("track.level=most", "track.level=most: unknown level; allowed: summary, requests, full"),
        ("track.budget_bytes=0", "track.budget_bytes=0: must be more than 0 bytes, or null"),
        ("track.finish_timeout_s=0", "track.finish_timeout_s=0: must be more than 0 seconds"),
    ],
)
def test_mistakes(mcjax: Command, place: Path, word: str, message: str) -> None:
    answer = mcjax(*SMALL, word)
    assert answer.status == 2
    assert message in answer.err
    assert not runs(place)
