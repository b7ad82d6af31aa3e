"""A run can be decided again from its own log, and a log that was tampered with is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

import mcjax
from mcjax.app.replay import replay
from mcjax.errors import RunError
from mcjax.track.run import Run

REAL = ["workload.sessions=4", "workload.turns=2", "workload.rate_per_s=20", "verify=false"]
SIM = ["backend=sim", "workload=synthetic", "workload.sessions=30", "workload.rate_per_s=40"]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Run:
    runs = tmp_path_factory.mktemp("real")
    return mcjax.run([*REAL, f"track.sinks.0.directory={runs}"], progress=False)


def test_a_real_run_agrees_with_itself_row_for_row(real: Run) -> None:
    assert real.directory is not None
    result = replay(mcjax.load(real.directory))
    assert result.agrees, (result.differing_placements, [str(difference) for difference in result.differences])
    assert result.placements >= 2 * real.requests.num_rows
    assert result.rows["decisions"] == real.decisions.num_rows > 0
    assert result.rows["events"] == real.events.num_rows > 0
    assert result.answers > 0
    assert result.unanswered == 0


def test_an_answer_that_came_later_changes_the_replay(real: Run) -> None:
    late = _with_outcomes(real, lambda row: {**row, "time_ns": row["time_ns"] + 3_000_000} if row["call"] == 2 else row)
    assert not replay(late).agrees


def test_another_token_changes_the_replay(real: Run) -> None:
    def other(row: dict) -> dict:
        payload = json.loads(row["payload"])
        if row["mechanism"] != "d0" or row["call"] != 3:
            return row
        payload["tokens"][0] = [(token + 1) % 256 for token in payload["tokens"][0]]
        return {**row, "payload": json.dumps(payload)}

    result = replay(_with_outcomes(real, other))
    assert any(difference.table == "requests" for difference in result.differences)


@pytest.mark.parametrize("selection", ["kvcache_centric", "random", "least_loaded", "round_robin", "cache_aware"])
def test_simulated_placements_are_decided_again(selection: str, tmp_path: Path) -> None:
    overrides = [*SIM, "cluster=3p2d", f"sched/prefill={selection}", f"track.sinks.0.directory={tmp_path}"]
    run = mcjax.run(overrides, progress=False)
    result = replay(run)
    assert result.agrees, result.differing_placements
    assert result.placements >= 2 * run.requests.num_rows


def test_rejections_are_decided_again(tmp_path: Path) -> None:
    overrides = [
        *SIM,
        "cluster=1p1d",
        "sched/admission=early_rejection",
        "slo=paper",
        "slo.ttft_s=0.5",
        "workload.rate_per_s=400",
        "workload.first_prompt_tokens=[400,800]",
        f"track.sinks.0.directory={tmp_path}",
    ]
    run = mcjax.run(overrides, progress=False)
    assert run.summary["requests"]["rejected"] > 0
    assert replay(run).agrees


def test_another_policy_decides_otherwise(tmp_path: Path) -> None:
    overrides = [*SIM, "cluster=3p2d", "sched/prefill=round_robin", f"track.sinks.0.directory={tmp_path}"]
    run = mcjax.run(overrides, progress=False)

    def always_first(request, view, rng):
        from mcjax.sched.base import PrefillChoice

        return PrefillChoice(0)

    assert replay(run, prefill=always_first).differing_placements


def test_a_log_without_the_world_is_refused(real: Run) -> None:
    with pytest.raises(RunError, match="world"):
        replay(_with_outcomes(real, lambda row: None if row["mechanism"] == "world" else row))


def _with_outcomes(run: Run, change) -> Run:
    """The run, with its outcome log tampered with."""
    rows = [changed for row in run.outcomes.to_pylist() if (changed := change(row)) is not None]
    tables = {**{name: run.table(name) for name in ("requests", "events", "decisions", "reports", "samples")}}
    tables["outcomes"] = pa.Table.from_pylist(rows, schema=run.outcomes.schema)
    return Run(run.directory, run.summary, run.config, tables, "done", "")
