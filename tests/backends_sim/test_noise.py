"""Costs that the estimates do not see: what steps take is perturbed, seeded, and shows as estimate error."""

from __future__ import annotations

from pathlib import Path

import mcjax

SMALL = ["backend=sim", "workload=synthetic", "workload.sessions=40", "workload.rate_per_s=20", "cluster=2p1d"]


def test_noise_is_seeded_and_shows_as_estimate_error(tmp_path: Path) -> None:
    def summary(*overrides: str) -> dict:
        overrides = (*SMALL, f"track.sinks.0.directory={tmp_path}", "rerun=true", *overrides)
        return mcjax.run(overrides, progress=False).summary

    clean, noisy, again = summary(), summary("backend.noise=0.3"), summary("backend.noise=0.3")
    other = summary("backend.noise=0.3", "seed=1", "workload.seed=0")
    assert noisy["digest"] == again["digest"] != clean["digest"]
    assert other["digest"] != noisy["digest"]
    assert noisy["estimate_error"]["ttft_mape"] > clean["estimate_error"]["ttft_mape"] + 0.05
    assert noisy["requests"]["completed"] == clean["requests"]["completed"]
