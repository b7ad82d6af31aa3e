"""Models of several KV groups, and of latents, through all of a real run: pool, SSD, transfers, replay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mcjax
from family_cases import CONFIGS
from mcjax.app.replay import replay

pytestmark = [pytest.mark.check_long, pytest.mark.timeout(900)]


def run(place: Path, name: str, *overrides: str) -> mcjax.Run:
    place.mkdir(exist_ok=True)
    model = {**CONFIGS[name], "vocab_size": 259, "num_hidden_layers": 2, "max_position_embeddings": 2048}
    (place / "config.json").write_text(json.dumps(model))
    fixed = ["model=hf", f"model.path={place}", "backend.poison=true", f"track.sinks.0.directory={place / 'runs'}"]
    load = ["workload.sessions=4", "workload.turns=3", "workload.rate_per_s=20", "workload.think_time_s=0.05"]
    done = mcjax.run([*fixed, *load, *overrides], progress=False)
    assert done.summary["requests"]["completed"] == 12
    assert done.summary["compilations_after_warm_up"] == 0
    return done


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3"])
def test_disaggregated_is_colocated_with_an_ssd_below_and_the_run_is_replayed(name: str, tmp_path: Path) -> None:
    """The pool is too small for all, so that blocks come from the SSD too."""
    tiers = [f"kvpool.ssd_path={tmp_path / 'ssd'}", "kvpool.ssd_bytes=6e7", "backend.pool_blocks=40"]
    done = run(tmp_path, name, "cluster=1p1d", "verify=true", *tiers)
    assert done.summary["verified"]["requests"] == 12
    assert done.summary["verified"]["kv_blocks"] > 12
    assert done.summary["hit_tokens"]["delivered"] > 0
    result = replay(done)
    assert result.agrees, (result.differing_placements, [str(difference) for difference in result.differences])


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3"])
def test_blocks_rest_encoded(name: str, tmp_path: Path) -> None:
    done = run(tmp_path, name, "kvpool.dram_encoding=int8", "cluster=1m", "workload.accepts_lossy=true")
    assert done.summary["hit_tokens"]["delivered"] > 0


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3"])
def test_instances_in_processes_of_their_own(name: str, tmp_path: Path) -> None:
    """The shape goes to the workers as plain values."""
    done = run(tmp_path, name, "launcher=processes", "cluster=1p1d", "verify=true")
    assert done.summary["verified"]["requests"] == 12


def test_a_mesh_of_latents_serves(tmp_path: Path) -> None:
    done = run(tmp_path, "deepseek_v3", "cluster=1p1d", "backend.mesh={prefill: 2, decode: 1}", "verify=true")
    assert done.summary["verified"]["requests"] == 12
