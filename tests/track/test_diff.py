"""What tells two runs apart, down to the first row, decision and token."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from track_fixtures import ARGUMENTS, MS, fabricate, key_of, row

from mcjax.errors import RunError
from mcjax.track.arrow import Table, arrow
from mcjax.track.compare.diff import Change, TokenDifference, diff
from mcjax.track.compare.first import RowDifference, first_row, one_row
from mcjax.track.record import RunRecord, StrategySource
from mcjax.track.recorder import TableRecorder
from mcjax.track.run import Run, load
from mcjax.track.schemas import SCHEMAS
from mcjax.track.sinks.base import RunInfo
from mcjax.track.sinks.files import Files
from mcjax.track.summary import summarise
from mcjax.track.tracker import Tracker
from mcjax.types import Decision, RequestState


def run_of(recorder: TableRecorder, **record: Any) -> Run:
    tables = recorder.tables()
    return Run(None, summarise(tables, **ARGUMENTS), {}, tables, record=RunRecord(**record))


def decided(*choices: str, estimate: float = 1.0, outcome: float = math.nan) -> TableRecorder:
    recorder = TableRecorder(key_of)
    for index, choice in enumerate(choices):
        vectors = {"queue_s": [estimate, math.nan], "waits": [1.0, 2.0]}
        recorder.decision(
            Decision(
                index * MS,
                index,
                "prefill",
                "Mine",
                choice,
                names=["p0", "p1"],
                candidates={name: arrow().array(vector).to_numpy() for name, vector in vectors.items()},
                outcome_s=outcome,
            )
        )
    return recorder


def told_by(first: Run, second: Run) -> list[str]:
    return str(diff(first, second)).splitlines()


def test_equal_runs_are_equal_in_every_row() -> None:
    config = {"alpha": 1, "sched.prefill": "a"}
    found = diff(run_of(fabricate(), config=config), run_of(fabricate(), config=config))
    assert found.equal
    assert [*found.config, *found.environment, *found.inputs, *found.figures, *found.rows] == []
    assert "rows: equal in every row (the digests agree)" in str(found)


def test_config_and_choices_that_differ() -> None:
    first = run_of(fabricate(), config={"alpha": 1, "beta": None}, choices={"backend": "sim", "sched/prefill": "a"})
    second = run_of(fabricate(), config={"alpha": 2, "gamma": [1]}, choices={"backend": "jax", "sched/prefill": "a"})
    changes = [
        Change("backend/", "sim", "jax"),
        Change("alpha", "1", "2"),
        Change("beta", "null", "(absent)"),
        Change("gamma", "(absent)", "[1]"),
    ]
    assert diff(first, second).config == changes
    assert "  gamma: (absent) | [1]" in told_by(first, second)


def test_the_first_differing_decision() -> None:
    first, second = run_of(decided("p0", "p0", "p1", "p0")), run_of(decided("p0", "p0", "p0", "p1"))
    found = diff(first, second).decision
    assert found is not None
    assert found.first is not None
    assert found.second is not None
    assert (found.row, found.first["choice"], found.second["choice"]) == (2, "p1", "p0")
    lines = told_by(first, second)
    at = lines.index("first differing decision: request 2, prefill, at 0.002000 s")
    assert any("Mine chose p1" in line for line in lines[at : at + 12])
    assert any("Mine chose p0" in line for line in lines[at : at + 20])
    rows = [line.split() for line in lines[at:]]
    assert ["candidate", "queue", "total", "waits"] in rows  # with their estimates
    assert ["*", "p1", "-", "-", "2"] in rows
    assert ["*", "p0", "1", "s", "1", "s", "1"] in rows


def test_other_estimates_are_the_same_decision() -> None:
    first, second = run_of(decided("p0", "p1")), run_of(decided("p0", "p1", estimate=2.0, outcome=3.0))
    found = diff(first, second)
    assert found.decision is None
    row = found.rows["decisions"]
    assert isinstance(row, RowDifference)
    assert (row.row, row.column) == (0, "queue_s")
    assert "first differing decision: none" in str(found)
    assert "only what was estimated or came of it: row 0, queue_s" in str(found)


def test_one_run_decides_longer() -> None:
    first, second = run_of(decided("p0", "p1")), run_of(decided("p0"))
    found = diff(first, second).decision
    assert found is not None
    assert found.row == 1
    assert found.second is None
    assert "where the other run has no more" in str(diff(first, second))
    assert "  decisions: equal as far as row 1; 2 | 1 rows" in told_by(first, second)


def answered(outputs: Mapping[int, list[int]]) -> TableRecorder:
    recorder = TableRecorder(key_of)
    for request_id, output in outputs.items():
        ends = [(10 * request_id + at + 1) * MS for at in range(max(len(output), 1))]
        recorder.request(row(request_id, request_id * MS, ends, RequestState.COMPLETED, output=output))
    return recorder


def test_the_first_differing_token() -> None:
    first = run_of(answered({3: [7, 8, 9], 1: [1, 2, 3], 2: [4, 5]}))
    second = run_of(answered({1: [1, 2, 3], 2: [4, 6], 3: [0, 8, 9], 4: [1]}))
    assert diff(first, second).tokens == TokenDifference(2, 1, 5, 6)  # request 2 arrived before 3
    shorter = run_of(answered({1: [1, 2], 2: [4, 5], 3: [7, 8, 9]}))
    assert diff(first, shorter).tokens == TokenDifference(1, 2, 3, None)
    assert "first differing token: request 1, position 2: 3 | (ended)" in told_by(first, shorter)
    longer = run_of(answered({1: [1, 2, 3], 2: [4, 5], 3: [7, 8, 9], 9: [1]}))
    assert diff(first, longer).tokens is None
    assert "first differing token: none, outputs of the same requests are equal" in told_by(first, longer)
    assert "were not kept" in str(diff(first, run_of(answered({1: [], 2: []}))).tokens)
    assert diff(first, run_of(answered({8: [1]}))).tokens == "no request is in both"


def test_figures_that_differ() -> None:
    first, second = run_of(fabricate()), run_of(decided("p0"))
    names = [change.name for change in diff(first, second).figures]
    assert names[:2] == ["requests.submitted", "requests.completed"]
    assert "ttft_s.p90" in names
    assert "backend" not in names


def keep(base: Path, record: RunRecord, sources: Mapping[str, str], **environment: Any) -> Run:
    info = RunInfo("sim", 7, "run", {"seed": 7}, {"packages": {"numpy": "2.4"}, **environment}, record, sources)
    tracker = Tracker([Files(str(base), overview=False)], info)
    tables = fabricate().tables()
    tracker.finish(tables, summarise(tables, **ARGUMENTS), "")
    assert tracker.directory is not None
    return load(tracker.directory)


def test_environment_and_inputs(tmp_path: Path) -> None:
    first = keep(tmp_path, RunRecord(code="a" * 64, inputs={"t.jsonl": "11"}), {}, revision="r1", python="3.11")
    second = keep(
        tmp_path,
        RunRecord(code="b" * 64, inputs={"t.jsonl": "22"}),
        {},
        revision="r2",
        python="3.11",
        diff="--- a/x.py\n+++ b/x.py\n@@\n",
        untracked=["new.py"],
    )
    found = diff(first, second)
    assert found.equal
    assert found.inputs == [Change("t.jsonl", "11", "22")]
    assert found.environment == [
        Change("code", "a" * 12, "b" * 12),
        Change("revision", "r1", "r2"),
        Change("uncommitted changes", "none", "x.py, new.py"),
    ]
    assert second.directory is not None
    (second.directory / "environment.json").write_text("[")
    with pytest.raises(RunError, match=r"environment.json is damaged"):
        diff(first, second)


def test_own_code_as_a_unified_diff(tmp_path: Path) -> None:
    def kept(digest: str, text: str, place: str = "prefill") -> Run:
        source = StrategySource("mine.Pick", digest, ("strategies/mine.py",))
        return keep(tmp_path, RunRecord(strategies={place: source}), {"mine.py": text})

    first, second = kept("1", "a = 1\nb = 2\n"), kept("2", "a = 1\nb = 3\n")
    text = diff(first, second).strategies["prefill"]
    assert text.splitlines()[:3] == ["mine.Pick | mine.Pick", "--- first/mine.py", "+++ second/mine.py"]
    assert text.splitlines()[-2:] == ["-b = 2", "+b = 3"]
    assert not diff(first, kept("1", "a = 1\nb = 2\n")).strategies
    assert list(diff(first, kept("1", "", "decode")).strategies) == ["prefill", "decode"]
    records = [replace(first.record, strategies={"prefill": StrategySource("f", digest)}) for digest in "89"]
    unkept, other = (Run(None, first.summary, {}, {}, record=record) for record in records)
    assert diff(unkept, other).strategies["prefill"].endswith("its source was not kept")


def test_rich_and_html(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    found = diff(run_of(decided("<p0>")), run_of(decided("p1")))
    Console(width=100).print(found)
    assert "first differing decision: request 0, prefill" in capsys.readouterr().out
    assert "Mine chose &lt;p0&gt;" in found._repr_html_()


def samples(values: list[float | None]) -> Table:
    count = len(values)
    columns = {"time_ns": [*range(count)], "source": [""] * count, "metric": ["m"] * count, "value": values}
    return arrow().table({name: arrow().array(column) for name, column in columns.items()})


@given(
    values=st.lists(st.sampled_from([0.0, 1.0, math.nan]), max_size=30),
    other=st.lists(st.sampled_from([0.0, 1.0, math.nan]), max_size=30),
    shared=st.integers(0, 30),
    rows=st.integers(1, 7),
)
def test_the_first_row_is_found_whatever_the_pieces(
    values: list[float], other: list[float], shared: int, rows: int
) -> None:
    other = [*values[:shared], *other]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mcjax.track.compare.first.piece_rows", lambda table: rows)
        runs = [Run(None, {}, {}, {"samples": samples(list(side))}) for side in (values, other)]
        found = first_row(runs[0], runs[1], "samples")
    both = itertools.zip_longest(map(str, values), map(str, other))
    parted = next((at for at, (one, another) in enumerate(both) if one != another), None)
    assert (found.row if found else None) == parted


def test_stored_tables_are_compared_like_those_in_memory(tmp_path: Path) -> None:
    stored = keep(tmp_path, RunRecord(), {})
    memory = run_of(fabricate())
    assert all(first_row(stored, memory, table) is None for table in SCHEMAS)
    assert one_row(stored, "decisions", 1) is not None
    assert one_row(stored, "decisions", 99) is None
    names = json.dumps(one_row(stored, "decisions", 0))
    assert '"p1"' in names
