"""`run.json`: written and read back, of older versions, damaged, and made up from other files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from mcjax.errors import RunError
from mcjax.track import record
from mcjax.track.record import RunRecord, StrategySource

RECORD = RunRecord(
    run_key="ab" * 32,
    started="2025-11-29T15:32:10+00:00",
    backend="sim",
    argv=("mcjax", "seed=1"),
    choices={"sched/prefill": "custom"},
    config={"seed": 1, "slo.ttft_s": float("inf"), "workload.turns": [1, 5]},
    code="cd" * 32,
    inputs={"trace.jsonl": "ef" * 32},
    strategies={"prefill": StrategySource("Mine(alpha=2)", "01" * 32, ("strategies/my_policy.py",))},
    headline={"goodput_rps": 1.5, "ttft_s.p90": None},
    digest="99",
)


def test_written_and_read_back(tmp_path: Path) -> None:
    (tmp_path / record.FILE).write_text(RECORD.text())
    assert record.read(tmp_path) == RECORD


def test_unknown_fields_are_passed_over_and_missing_ones_have_defaults(tmp_path: Path) -> None:
    values = {"version": 1, "run_key": "k", "from_the_future": 3}
    (tmp_path / record.FILE).write_text(json.dumps(values))
    assert record.read(tmp_path) == RunRecord(run_key="k")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "damaged"),
        ("[]", "no record"),
        ("{}", "no record"),
        (json.dumps({"version": 99}), "has version 99, this mcjax reads up to 1"),
        (json.dumps({"version": 1, "strategies": {"prefill": {}}}), "damaged"),
        (json.dumps({"version": 1, "strategies": 3}), "damaged"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / record.FILE).write_text(text)
    with pytest.raises(RunError, match=problem) as caught:
        record.read(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_run_from_before_there_were_records(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("backend: {name: sim}\nseed: 3\n")
    (tmp_path / "environment.json").write_text(json.dumps({"argv": ["mcjax", "seed=3"]}))
    found = record.read(tmp_path)
    assert asdict(found) == asdict(
        RunRecord(backend="sim", argv=("mcjax", "seed=3"), config={"backend.name": "sim", "seed": 3})
    )
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(RunError, match="damaged"):
        record.read(tmp_path)
