"""The log tells of each block whose it is, where, when, and how large, and nothing out of turn.

The same is asked of the real engine in `test_real_engine.py`.
"""

from __future__ import annotations

from collections import Counter

import block_life
import pytest
from conftest_app import ROOT

import mcjax
from mcjax.track.run import Run

SIM = ("backend=sim", "hardware=a800x8", "model=llama3-70b", "track=none")


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> block_life.Names:
    return block_life.watch(monkeypatch.setattr)


def test_blocks_of_conversations_with_pulls_and_write_backs(names: block_life.Names) -> None:
    load = ("workload=synthetic", "workload.sessions=30", "workload.rate_per_s=30", "sched/prefill=kvcache_centric")
    run = mcjax.run([*SIM, *load, "cluster=3p2d"], progress=False)
    counts = block_life.follow(run, names)
    assert min(counts[kind] for kind in ("insert", "hit", "transfer", "release", "prefill_step")) > 30
    assert counts["release"] >= counts["completed"] == run.requests.num_rows


def test_blocks_that_are_evicted_and_come_again(names: block_life.Names) -> None:
    load = ("workload=synthetic", "workload.sessions=30", "workload.rate_per_s=30", "kvpool.dram_bytes=1e9")
    run = mcjax.run([*SIM, *load, "cluster=2p1d+1m"], progress=False)
    counts = block_life.follow(run, names)
    assert counts["evict"] > 30 < counts["insert"]
    events = run.events.to_pylist()
    inserted = Counter((e["place"], e["first_block"]) for e in events if e["kind"] == "insert")
    assert max(inserted.values()) > 1, "some came again"


@pytest.mark.parametrize("cluster", ["2p1d", "2m"])
def test_blocks_that_stay_on_the_device(cluster: str, names: block_life.Names) -> None:
    """Each tier has its own life of a block; pages run out, so that some leave the device before the host."""
    load = ("workload=synthetic", "workload.sessions=40", "workload.turns=4", "workload.rate_per_s=60")
    small = ("kvpool.hbm_cache=true", "backend.memory_share=0.231", "engine.headroom_tokens=16")
    run = mcjax.run([*SIM, *load, *small, f"cluster={cluster}"], progress=False)
    block_life.follow(run, names)
    events = run.events.to_pylist()
    on_device = Counter(event["kind"] for event in events if event["tier"] == "hbm")
    assert min(on_device[kind] for kind in ("insert", "hit", "evict")) > 30, on_device
    assert run.summary["tokens_by_tier"]["hbm"] > 0


def test_blocks_under_faults(names: block_life.Names) -> None:
    counts: Counter[str] = Counter()
    for seed in range(8):
        names.clear()
        counts += block_life.follow(campaign_of_one(seed), names)
    assert min(counts[kind] for kind in ("insert", "hit", "drop", "transfer_failed", "death")) > 0, counts
    table = (ROOT / "docs/track.md").read_text().split("## Events")[1].split("\n## ")[0]
    told = {
        kind for line in table.splitlines() if line.startswith("| `") for kind in line.split("|")[1].split("`")[1::2]
    }
    assert counts.keys() <= told, "a kind that docs/track.md does not tell of"


def campaign_of_one(seed: int) -> Run:
    overrides = ["backend=check", "faults=random", "backend.schedules=1", f"seed={seed}", "track=none"]
    return mcjax.run(overrides, progress=False)
