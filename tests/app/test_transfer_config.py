"""What a config says of paths: refused by name where it makes no sense, and seen in the run where it does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import mcjax
from mcjax.errors import ConfigError
from mcjax.transfer.paths.base import Candidate

SIM = [
    *("backend=sim", "hardware=a800x8", "model=llama3-70b", "workload=synthetic", "workload.sessions=12"),
    *("cluster=2p2d", "slo=none"),
]


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        ([*SIM, "transfer.failures=0"], "transfer.failures", "1 or more"),
        ([*SIM, "transfer.backoff_s=-1"], "transfer.backoff_s", "0 or more"),
        ([*SIM, "transfer.backoff_s=9"], "transfer.backoff_s", r"most_backoff_s=5"),
        ([*SIM, "transfer.shares={0: 2}"], "transfer.shares.0", "at most 1"),
        ([*SIM, "transfer.shares={low: 0.1}"], "transfer.shares.low", "whole number"),
        ([*SIM, "transfer.shares={0: 0.1}"], "transfer.shares", "classes of their own"),
        ([*SIM, "transfer.slice_bytes=4096"], "transfer.slice_bytes", "whole copies"),
        ([*SIM, "transfer.window_bytes=0"], "transfer.window_bytes", "1 or more"),
        ([*SIM, "transfer.topology=ring"], "transfer.topology", "nics"),
        ([*SIM, "transfer.topology={nics: 4, switches: tree}"], "transfer.topology.switches", "rail"),
        ([*SIM, "transfer.topology={cards: 4}"], "transfer.topology.cards", "no part"),
        (["transfer.topology=nics"], "transfer.topology", "simulated"),
        ([*SIM, "transfer/paths=custom"], "transfer.paths._target_", "must be given"),
        (["backend=check", "transfer/paths=nearest"], "transfer.paths", "no use"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(overrides: list[str], key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        mcjax.run(overrides, progress=False)
    assert caught.value.key.startswith(key)


def samples_of(run: mcjax.Run) -> dict[str, list[str]]:
    """Sources of each metric."""
    found: dict[str, list[str]] = {}
    for row in run.samples.to_pylist():
        found.setdefault(row["metric"], []).append(row["source"])
    return found


def test_nics_that_are_told_apart_show_in_summary_samples_and_events(tmp_path: Path) -> None:
    keep = f"track.sinks.0.directory={tmp_path}"
    run = mcjax.run(
        [*SIM, "transfer.topology=nics", "transfer/paths=striped", "track.sample_period_s=0.5", keep], progress=False
    )
    paths: dict[str, dict[str, Any]] = run.summary["paths"]
    nics = [name for name in paths if name.startswith("network:")]
    assert len(nics) == 8, "four of each prefill node"
    assert sum(paths[name]["moved_bytes"] for name in nics) == run.summary["bytes_by_transport"]["network"]
    for node in ("node-p0", "node-p1"):
        moved = [paths[name]["moved_bytes"] for name in nics if node in name]
        assert max(moved) - min(moved) < 0.35 * max(moved), "a few blocks of 10 MB in each copy"
    assert all(paths[name]["is_well"] and not paths[name]["failures"] for name in paths)
    assert {"path_waiting", "path_in_flight_bytes", "path_moved_bytes", "path_expected_bytes_per_s"} <= set(
        samples_of(run)
    )
    details = {row["detail"].split(":")[0] for row in run.events.to_pylist() if row["kind"] == "transfer"}
    assert details == {"device", "network"}


def test_without_a_topology_nothing_is_added_to_the_rows() -> None:
    run = mcjax.run([*SIM, "track=none"], progress=False)
    assert set(run.summary["paths"]) == {"device", "network"}
    assert not [metric for metric in samples_of(run) if metric.startswith("path_")]


def test_a_strategy_of_ones_own_decides() -> None:
    seen: list[int] = []

    def last_one(blocks: int, block_bytes: int, candidates: Sequence[Candidate]) -> list[int]:
        seen.append(len(candidates))
        return [0] * (len(candidates) - 1) + [blocks]

    run = mcjax.run([*SIM, "transfer.topology=rails", "track=none"], progress=False, paths=last_one)
    assert seen
    assert set(seen) == {4}
    assert {name for name in run.summary["paths"] if ":" in name} == {"network:node-p0/nic3", "network:node-p1/nic3"}


@pytest.mark.parametrize("paths", ["least_queued", "striped", "nearest"])
def test_equal_configs_give_equal_rows_over_several_nics(paths: str) -> None:
    overrides = [*SIM, "transfer.topology=nics", f"transfer/paths={paths}", "track=none", "rerun=true"]
    first, second = (mcjax.run(overrides, progress=False).summary["digest"] for _ in range(2))
    assert first == second
