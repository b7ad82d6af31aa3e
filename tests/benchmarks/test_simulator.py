"""Every part of `benchmarks/simulator.py` runs, at sizes that say nothing, and leaves the figures that it promises."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Benchmark = Callable[..., tuple[dict[str, Any], subprocess.CompletedProcess[str]]]

USAGE = {"command", "cpu_s", "user_s", "system_s", "wall_s", "peak_rss_bytes", "reference_s"}
RUN = USAGE | {"requests", "cpu_per_request_us", "virtual_s", "ttft_s", "tbt_s", "digest"}
POOL = {"match", "pin_and_release", "match_pin_and_release", "name_trace_blocks", "hash"}
PART = {"command", "machine"}


def test_conv2x_without_dynosim(benchmark_run: Benchmark, tmp_path: Path) -> None:
    """An interpreter that lacks DynoSim is told, and the rest is measured."""
    results, done = benchmark_run("conv2x", "--requests", "30", "--dynosim-python", sys.executable)
    assert done.returncode == 0, done.stderr
    part = results["conv2x"]
    assert part.keys() == PART | {"requests", "ours", "overloaded", "dynosim"}
    assert part["requests"] == 30
    assert [run.keys() for run in part["ours"]["runs"]] == [RUN, RUN]
    assert part["ours"]["deterministic"] is True
    assert part["ours"]["runs"][0]["requests"]["completed"] == 30
    assert part["overloaded"].keys() == RUN | {"hardware"}
    assert part["dynosim"]["measured"] is False
    assert "dynamo" in part["dynosim"]["why"]
    assert part["dynosim"]["why"] in done.stderr
    assert part["command"].startswith("python benchmarks/simulator.py conv2x")
    assert "hardware=h800x8" in part["ours"]["runs"][0]["command"]
    assert "| mcjax, h800x8 |" in done.stdout
    assert not list((tmp_path / "out" / "runs").iterdir())


@pytest.mark.slow
def test_conv2x_with_a_stand_in_for_dynosim(benchmark_run: Benchmark, tmp_path: Path) -> None:
    """The other simulator's side, with a package in its place whose reports differ from run to run."""
    package = tmp_path / "dynamo" / "replay"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import os, types\n"
        "def run_trace_replay(trace, **told):\n"
        "    assert told['num_prefill_workers'] == told['num_decode_workers'] == 8\n"
        "    rows = sum(1 for line in open(trace))\n"
        "    return types.SimpleNamespace(summary={'rows': rows, 'wall_time_ms': os.getpid(), 'draw': os.getpid()})\n"
    )
    (tmp_path / "ai_dynamo_runtime-0.0.dist-info").mkdir()
    (tmp_path / "ai_dynamo_runtime-0.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: ai-dynamo-runtime\nVersion: 0.0\n"
    )
    stand_in = tmp_path / "stand-in"
    stand_in.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    stand_in.chmod(0o755)
    results, done = benchmark_run("conv2x", "--requests", "12", "--dynosim-python", str(stand_in))
    assert done.returncode == 0, done.stderr
    part = results["conv2x"]
    theirs = part["dynosim"]
    assert theirs["measured"] is True
    assert theirs["version"] == "0.0"
    assert [run["report"]["rows"] for run in theirs["runs"]] == [12, 12]
    assert theirs["deterministic"] is False
    assert theirs["differing"] == ["draw"]
    assert part["cpu_ratio"] == part["ours"]["cpu_s"] / theirs["cpu_s"]
    assert "mcjax / DynoSim: CPU" in done.stdout


def test_scale(benchmark_run: Benchmark, tmp_path: Path) -> None:
    results, done = benchmark_run("scale", "--requests", "40", "--instances", "4")
    assert done.returncode == 0, done.stderr
    part = results["scale"]
    assert part.keys() == PART | {"rate_per_prefill_instance", "rows"}
    assert [row["instances"] for row in part["rows"]] == [4]
    for row in part["rows"]:
        assert row.keys() == RUN | {"instances", "start_cpu_s", "more_cpu_per_request_us"}
        assert row["requests"]["completed"] == 40
        assert "track.level=requests" in row["command"]
    assert (tmp_path / "out" / "scale.png").stat().st_size > 0
    assert "| instances | requests |" in done.stdout


@pytest.mark.slow
def test_scale_profile(benchmark_run: Benchmark) -> None:
    results, done = benchmark_run("scale", "--requests", "40", "--instances", "2", "6", "--profile")
    assert done.returncode == 0, done.stderr
    assert [row["instances"] for row in results["scale"]["rows"]] == [2, 6]
    profile = results["scale"]["profile"]
    assert (profile["smallest"], profile["instances"], profile["requests"]) == (2, 6, 40)
    growth = [row["own_us"] - row["own_us_smallest"] for row in profile["functions"]]
    assert growth == sorted(growth, reverse=True)
    assert profile["total_us"] > 0
    places = [row["function"].split(": ") for row in profile["functions"]]
    assert all(len(place) == 2 and not place[0].startswith("/") for place in places)


@pytest.mark.slow
def test_overload(benchmark_run: Benchmark) -> None:
    results, done = benchmark_run("overload", "--requests", "60")
    assert done.returncode == 0, done.stderr
    part = results["overload"]
    assert part.keys() == PART | {"requests", "normal", "overload_swap", "overload_recompute"}
    assert part["normal"].keys() == RUN | {"events", "preemptions", "retries"}
    assert part["normal"]["preemptions"] == 0
    for name in ("overload_swap", "overload_recompute"):
        assert part[name].keys() == part["normal"].keys() | {"cpu_per_request_ratio"}
        assert part[name]["requests"]["completed"] == 60


def test_placement(benchmark_run: Benchmark, tmp_path: Path) -> None:
    results, done = benchmark_run("placement", "--instances", "6", "--blocks", "3000", "--placements", "20")
    assert done.returncode == 0, done.stderr
    part = results["placement"]
    assert part["process"].keys() == USAGE
    assert (part["instances"], part["blocks"], part["placements"]) == (6, 3000, 20)
    assert 2900 < part["directory_blocks"] <= 3000
    pairs = {(row["prefill"], row["decode"]) for row in part["place"]}
    assert {("kvcache_centric", "least_loaded"), ("random", "least_loaded")} <= pairs
    assert len(pairs) == len({p for p, _ in pairs}) * len({d for _, d in pairs})
    assert all(row["mean_us"] >= row["least_us"] > 0 for row in part["place"])
    assert part["pool"].keys() == {"pool_blocks", *POOL}
    assert (tmp_path / "out" / "placement.png").stat().st_size > 0


def test_a_part_leaves_the_figures_of_others(benchmark_run: Benchmark, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").write_text('{"other": {"kept": 1}}')
    results, done = benchmark_run("placement", "--instances", "2", "--blocks", "500", "--placements", "2")
    assert done.returncode == 0, done.stderr
    assert results["other"] == {"kept": 1}
    assert results.keys() == {"other", "placement"}


@pytest.mark.parametrize("part", ["conv2x", "scale", "overload"])
def test_a_missing_trace_is_told(benchmark_run: Benchmark, tmp_path: Path, part: str) -> None:
    results, done = benchmark_run(part, traces=tmp_path / "nowhere")
    assert done.returncode == 1
    assert "Set MCJAX_TRACES" in done.stderr
    assert "Traceback" not in done.stderr
    assert results == {}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["speed"], "no part speed; there are conv2x, scale, overload, placement"),
        (["scale", "--instances", "3"], "must be even"),
        (["scale", "--requests", "0"], "must be 1 or more"),
    ],
)
def test_mistakes(benchmark_run: Benchmark, arguments: list[str], told: str) -> None:
    _, done = benchmark_run(*arguments)
    assert done.returncode == 2
    assert told in done.stderr
