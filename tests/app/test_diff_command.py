"""`mcjax diff` on real simulated runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest_app import SMALL, Answer, runs

import mcjax as package
from mcjax.app import diff
from mcjax.track.compare.comparison import compare as compared
from mcjax.track.compare.diff import diff as difference
from mcjax.track.run import load

Call = Callable[..., Answer]


@pytest.fixture
def call(place: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """`mcjax diff` in this process."""

    def run(*arguments: str) -> Answer:
        capsys.readouterr()
        status = diff.command(list(arguments))
        captured = capsys.readouterr()
        return Answer(status, captured.out, captured.err)

    return run


def test_equal_and_different_runs(place: Path, call: Call) -> None:
    for policy in ("random", "random", "kvcache_centric"):
        package.run([*SMALL, "rerun=true", f"sched/prefill={policy}"])
    first, again, other = (run.name for run in runs(place))
    answer = call(first, again)
    assert (answer.status, answer.err) == (0, "")
    assert "rows: equal in every row (the digests agree)" in answer.out
    assert "config: no difference" in answer.out
    assert "environment: no difference" in answer.out
    answer = call(first, f"runs/{other}")
    assert answer.status == 0
    assert "  sched/prefill: random | kvcache_centric" in answer.out.splitlines()
    assert "first differing decision: request " in answer.out
    assert "Random chose" in answer.out
    assert "KVCacheCentric chose" in answer.out
    assert "first differing token: none" in answer.out  # a policy changes no answer
    # The row that it names is the first in which the tables differ, by the tables themselves.
    loaded = [load(place / "runs" / name) for name in (first, other)]
    found = difference(*loaded).decision
    assert found is not None
    tables = [
        run.decisions.select(["time_ns", "request_id", "stage", "choice", "source", "reused_tokens"]) for run in loaded
    ]
    rows = [table.to_pylist() for table in tables]
    assert rows[0][: found.row] == rows[1][: found.row]
    assert rows[0][found.row] != rows[1][found.row]


def test_runs_that_kept_no_tables(place: Path, call: Call) -> None:
    for policy in ("random", "kvcache_centric"):
        package.run([*SMALL, "track.level=summary", f"sched/prefill={policy}"])
    names = [run.name for run in runs(place)]
    answer = call(*names)
    assert answer.status == 0
    assert "  sched/prefill: random | kvcache_centric" in answer.out.splitlines()
    assert "first differing decision: unknown" in answer.out
    assert "kept at track.level=summary" in answer.out
    assert "  ttft_s.p90: " in answer.out
    groups = compared([load(run) for run in runs(place)])
    assert any("their requests were not kept" in note for note in groups.notes)


def test_refusals(place: Path, call: Call) -> None:
    answer = call("runs/none", "runs/none")
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.startswith("mcjax: runs/none: no such run")
