"""Published models in the simulator: what their configs say decides how many bytes move."""

from __future__ import annotations

import pytest

import mcjax
from mcjax.cost.catalogue import model

SIM = [
    *("backend=sim", "cluster=1p1d", "hardware=h200x8", "track.sinks=[]", "kvpool.block_tokens=32"),
    *("workload=synthetic", "workload.sessions=6", "workload.rate_per_s=4", "workload.turns=[1,2]"),
]


@pytest.mark.parametrize("name", ["deepseek-v3", "gemma3-27b", "mixtral-8x7b"])
def test_blocks_are_as_large_as_the_shape_says(name: str) -> None:
    run = mcjax.run([*SIM, f"model={name}"], progress=False)
    assert {row["state"] for row in run.requests.to_pylist()} == {"completed"}
    moved = [(row["bytes"], row["blocks"]) for row in run.events.to_pylist() if row["bytes"] and row["blocks"]]
    assert moved
    assert {nbytes / blocks for nbytes, blocks in moved} == {32 * model(name).kv_bytes_per_token}
