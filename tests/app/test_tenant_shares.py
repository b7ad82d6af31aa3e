"""Tenants' shares of small pools, from the config to the hits of each tenant."""

from __future__ import annotations

import pytest

import mcjax
from mcjax.errors import ConfigError

SMALL = [
    *("backend=sim", "cluster=1m", "hardware=a800x8", "model=llama3-70b", "kvpool.dram_bytes=5e9", "track.sinks=[]"),
    *("workload=synthetic", "workload.sessions=60", "workload.rate_per_s=4", "workload.turns=[3,6]"),
    "workload.first_prompt_tokens=[400,900]",
]


def hit_rates(*overrides: str) -> dict[str, float]:
    rows = mcjax.run([*SMALL, *overrides], progress=False).requests.to_pylist()
    assert {row["state"] for row in rows} == {"completed"}
    found: dict[str, float] = {}
    for tenant in ("interactive", "batch"):
        own = [row for row in rows if row["tenant"] == tenant]
        found[tenant] = sum(row["local_tokens"] for row in own) / sum(row["prompt_tokens"] for row in own)
    return found


def test_floors_and_ceilings_decide_whose_blocks_stay() -> None:
    usual = hit_rates()
    sure = hit_rates("+kvpool.tenants={batch: {floor: 0.6}}")
    assert sure["batch"] > usual["batch"]
    assert sure["interactive"] < usual["interactive"]
    held = hit_rates("+kvpool.tenants={interactive: {ceiling: 0.3}}")
    assert held["interactive"] < usual["interactive"]
    assert held["batch"] > usual["batch"]


def test_a_share_that_cannot_be_is_named_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"kvpool\.tenants\.batch\.floor.*above the tenant's ceiling of 0\.4"):
        mcjax.run([*SMALL, "+kvpool.tenants={batch: {floor: 0.5, ceiling: 0.4}}"], progress=False)
