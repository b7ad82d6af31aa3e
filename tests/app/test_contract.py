"""The run directory, the seeds, sweeps, and what is imported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest_app import BARE, SIM, SMALL, Answer, runs

import mcjax as package
from mcjax.app.streams import Stream, generator, seed_of
from mcjax.errors import VerificationError

Command = Callable[..., Answer]
ARRIVALS = ["request_id", "session", "turn", "tenant", "prompt_tokens", "max_tokens", "priority"]
SELECTIONS = ("random", "round_robin", "least_loaded", "cache_aware", "kvcache_centric")
SPREAD = {"mean", "p50", "p90", "p99"}
SUMMARY: dict[str, set[str] | None] = {
    **dict.fromkeys("schema backend seed wall_s duration_s window_s slo_attainment goodput_rps digest".split()),
    **dict.fromkeys("output_tokens_per_s prefill_busy_s decode_busy_s peak_rss_bytes".split()),
    "requests": {"submitted", "completed", "rejected", "failed"},
    "ttft_s": SPREAD,
    "tbt_s": SPREAD,
    "tbt_tail_s": SPREAD,
    "prefix_hit_rate": {"token", "block"},
    "tokens_by_tier": {"computed"},
    "bytes_by_transport": {"device", "network"},
    "estimate_error": {"ttft_mape", "transfer_mape"},
}


def quiet(*overrides: str) -> package.Run:
    return package.run([*BARE, *overrides])


def test_run_directory(mcjax: Command, place: Path) -> None:
    answer = mcjax(*SIM, "workload.sessions=6")
    assert answer.status == 0, answer.err
    (directory,) = runs(place)
    tables = {f"{name}.parquet" for name in ("requests", "events", "reports", "decisions", "samples")}
    plain = {"config.yaml", "environment.json", "run.json", "summary.json", "overview.png", "DONE"}
    assert {path.name for path in directory.iterdir()} == tables | plain
    summary: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    for key, inner in SUMMARY.items():
        assert key in summary
        assert inner is None or inner <= set(summary[key]), key
    assert list(summary["requests"].values())[:2] == [summary["requests"]["submitted"]] * 2
    environment = json.loads((directory / "environment.json").read_text())
    assert environment["argv"] == ["mcjax", *SIM, "workload.sessions=6"]
    run = package.load(directory)
    assert run.config["cluster"] == "2p2d"
    assert run.requests.num_rows == summary["requests"]["submitted"]


def test_equal_seeds_give_equal_rows() -> None:
    first = quiet().summary["digest"]
    assert quiet().summary["digest"] == first
    assert quiet("seed=1").summary["digest"] != first


@pytest.mark.parametrize("selection", SELECTIONS)
def test_policy_never_changes_the_arrivals(selection: str) -> None:
    def first_turns(run: package.Run) -> list[dict[str, Any]]:
        rows = run.requests.select([*ARRIVALS, "arrival_ns", "blocks"]).to_pylist()
        return sorted((row for row in rows if row["turn"] == 0), key=lambda row: row["request_id"])

    def all_turns(run: package.Run) -> list[dict[str, Any]]:
        return sorted(run.requests.select(ARRIVALS).to_pylist(), key=lambda row: row["request_id"])

    base, other = quiet("sched/prefill=random"), quiet(f"sched/prefill={selection}", "sched.view_delay_s=0.5")
    names = ["arrival_ns", "prompt_tokens"]
    assert [[row[n] for n in names] for row in first_turns(base)] == [
        [row[n] for n in names] for row in first_turns(other)
    ]
    assert all_turns(base) == all_turns(other)


def test_seed_streams_are_apart() -> None:
    drawn = {seed_of(seed, stream) for seed in range(50) for stream in Stream}
    assert len(drawn) == 50 * len(Stream)
    assert generator(3, Stream.POLICY).random() == generator(3, Stream.POLICY).random()
    assert generator(3, Stream.POLICY).random() != generator(3, Stream.SAMPLING).random()


@pytest.mark.check_long
def test_sweep_keeps_a_run_a_point(mcjax: Command, place: Path) -> None:
    answer = mcjax(*SMALL, "-m", "sched/prefill=random,cache_aware", "seed=1,2")
    assert answer.status == 0, answer.err
    kept = [package.load(directory) for directory in runs(place)]
    points = {(run.config["seed"], run.config["sched"]["prefill"]["_target_"].split(".")[-1]) for run in kept}
    assert points == {(seed, name) for seed in (1, 2) for name in ("Random", "CacheAware")}


def test_simulation_imports_no_jax(fresh: Command) -> None:
    code = """
import sys
from mcjax.app.command import main
assert main(sys.argv[1:]) == 0
heavy = [name for name in ("jax", "jaxlib", "flax", "wandb", "torch", "orbax") if name in sys.modules]
assert not heavy, heavy
"""
    answer = fresh(*SMALL, code=code)
    assert answer.status == 0, answer.err


def test_import_is_light(fresh: Command) -> None:
    answer = fresh(
        code="import mcjax, sys; print([n for n in ('numpy', 'hydra', 'pyarrow', 'jax', 'rich') if n in sys.modules])"
    )
    assert answer.out.strip() == "[]", answer.err


def test_help_needs_nothing(fresh: Command) -> None:
    code = """
import runpy, sys
sys.argv = ["mcjax", "--help"]
runpy.run_module("mcjax.cli", run_name="__main__")
assert not [name for name in ("numpy", "hydra", "omegaconf", "pyarrow", "jax", "rich") if name in sys.modules]
"""
    answer = fresh(code=code)
    assert answer.status == 0, answer.err
    assert "backend=sim" in answer.out


def test_version(fresh: Command) -> None:
    assert fresh("--version").out == f"mcjax {package.__version__}\n"


def test_config_is_printed_without_a_run(mcjax: Command, place: Path) -> None:
    answer = mcjax(*SMALL, "--cfg", "job")
    assert answer.status == 0
    assert "cluster: 2p2d" in answer.out
    assert not runs(place)


def test_plain_progress_then_table_then_directory(mcjax: Command, place: Path) -> None:
    lines = mcjax(*SMALL).out.splitlines()
    assert any(line.lstrip().startswith("goodput") for line in lines)
    assert lines[-1] == f"run directory: {runs(place)[0].relative_to(place)}"


def test_progress_knows_the_total(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mcjax.track import console

    totals: list[int] = []
    real = console.Progress

    def watched(**options: Any) -> console.Progress:
        totals.append(options["total_requests"])
        return real(**options)

    from mcjax.app.build import workload_of
    from mcjax.app.compose import compose

    workload = workload_of(compose(SMALL))
    workload.total_requests = 17
    monkeypatch.setattr(console, "Progress", watched)
    package.run(BARE, workload=workload, progress=True)
    assert totals == [17]


def test_wandb_offline(mcjax: Command, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    answer = mcjax(*SMALL, "track=wandb")
    assert answer.status == 0, answer.err
    assert "wandb sync" in answer.out
    assert list((place / "runs" / "wandb").glob("offline-run-*/*.wandb"))


def test_a_campaign_says_what_it_did(mcjax: Command, place: Path) -> None:
    answer = mcjax("backend=check", "faults=random", "backend.schedules=12", "seed=3")
    assert answer.status == 0, answer.err
    for words in ("12 in", "0 failed", "nothing wrong", "corrupted", "of the schedule of seed 14"):
        assert words in answer.out
    check = json.loads((runs(place)[0] / "summary.json").read_text())["check"]
    assert check["schedules"] == 12
    assert check["problems"] == []
    assert check["requests"] == sum(check["states"].values()) > 60


def test_a_campaign_that_finds_something_fails(mcjax: Command, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mcjax.app import campaign
    from mcjax.backends.check.schedule import Outcome

    def broken(seed: int, *arguments: Any) -> Outcome:
        outcome = real(seed, *arguments)
        outcome.problems += ["wrong: request 1"] if seed == 5 else []
        return outcome

    real = campaign.run_schedule
    monkeypatch.setattr(campaign, "run_schedule", broken)
    with pytest.raises(VerificationError, match=r"1 of 4 schedules failed\n  seed 5 .*wrong: request 1"):
        package.run(["backend=check", "backend.schedules=4", "seed=3"], progress=False)
    assert (runs(place)[0] / "FAILED").exists()
