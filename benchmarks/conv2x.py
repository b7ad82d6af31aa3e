"""`conv2x`: Mooncake's conversation trace twice over on 8 prefill and 8 decode instances, beside NVIDIA's DynoSim."""

from __future__ import annotations

import argparse
import heapq
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dynosim
from measure import BenchmarkError, say
from simulated import Simulated, simulate

NAMES = ("conversation_trace.jsonl", "mooncake_fast25_conversation.jsonl")
SHIFT_MS = 137
REQUESTS = 23_608
OVERRIDES = ("experiment=mooncake_8p8d", "sched/prefill=kvcache_centric", "workload.path=conv2x.jsonl")


def run(out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Both simulators on the same file, in turn, so that other load on the machine falls on both."""
    requests = write_trace(find_trace(), out / "conv2x.jsonl", min(options.requests or REQUESTS, REQUESTS))
    ours: list[Simulated] = []
    theirs: list[dict[str, Any]] = []
    missing = dynosim.missing(options.dynosim_python)
    if missing:
        say(f"conv2x: DynoSim is not measured: {missing}")
    for turn in range(options.repeats):
        ours.append(simulate(out, f"conv2x-{turn}", [*OVERRIDES, "hardware=h800x8"]))
        if not missing:
            theirs.append(dynosim.replay(out, options.dynosim_python, "conv2x.jsonl", turn))
    overloaded = simulate(out, "conv2x-overloaded", [*OVERRIDES, "hardware=a800x8"])
    result: dict[str, Any] = {
        "requests": requests,
        "ours": {
            "hardware": "h800x8",
            "runs": [one.row() for one in ours],
            "cpu_s": _mean([one.usage.cpu_s for one in ours]),
            "peak_rss_bytes": max(one.usage.peak_rss_bytes for one in ours),
            "deterministic": len({one.summary["digest"] for one in ours}) == 1 if len(ours) > 1 else None,
        },
        "overloaded": {"hardware": "a800x8", **overloaded.row()},
        "dynosim": {"measured": False, "why": missing} if missing else _summed(theirs),
    }
    if not missing:
        result["cpu_ratio"] = result["ours"]["cpu_s"] / result["dynosim"]["cpu_s"]
        result["rss_ratio"] = result["ours"]["peak_rss_bytes"] / result["dynosim"]["peak_rss_bytes"]
        say(f"conv2x: {result['cpu_ratio']:.2f} x DynoSim's CPU, {result['rss_ratio']:.2f} x its memory")
    return result


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _summed(runs: list[dict[str, Any]]) -> dict[str, Any]:
    differing = dynosim.differences([one["report"] for one in runs])
    return {
        "measured": True,
        "version": runs[0]["version"],
        "runs": runs,
        "cpu_s": _mean([one["cpu_s"] for one in runs]),
        "peak_rss_bytes": max(one["peak_rss_bytes"] for one in runs),
        "deterministic": not differing if len(runs) > 1 else None,
        "differing": differing,
    }


def find_trace() -> Path:
    """The conversation trace, under either name. Raises `BenchmarkError` that says where it was looked for."""
    told = os.environ.get("MCJAX_TRACES")
    folders = [Path(told)] if told else [Path("traces")]
    tried = [folder / name for folder in folders for name in NAMES]
    for path in tried:
        if path.is_file():
            return path
    raise BenchmarkError(
        f"conv2x needs Mooncake's conversation trace (FAST25-release of kvcache-ai/Mooncake): none of "
        f"{', '.join(map(str, tried))}. Set MCJAX_TRACES to the folder that has it"
    )


def write_trace(source: Path, target: Path, requests: int) -> int:
    """Write the trace laid over itself 137 ms later, under block ids of its own, cut to `requests` rows."""
    with source.open() as lines:
        first_free = 1 + max(max(json.loads(line)["hash_ids"], default=0) for line in lines if line.strip())
    written = 0
    with target.open("w") as output:
        both = heapq.merge(_rows(source, 0, 0), _rows(source, SHIFT_MS, first_free), key=lambda row: row["timestamp"])
        for row in both:
            if written == requests:
                break
            output.write(json.dumps(row) + "\n")
            written += 1
    return written


def _rows(source: Path, shift_ms: int, shift_id: int) -> Iterator[dict[str, Any]]:
    with source.open() as lines:
        for line in lines:
            if line.strip():
                row = json.loads(line)
                ids = [block + shift_id for block in row["hash_ids"]]
                yield {**row, "timestamp": row["timestamp"] + shift_ms, "hash_ids": ids}
