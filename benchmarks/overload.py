"""`overload`: four times the arrivals on decode instances whose KV memory runs out, beside the normal run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from azure_load import write_load
from measure import say
from simulated import simulate

REQUESTS = 20_000
PREFILL, DECODE = 12, 8
RATE_PER_DECODE = 5.0
ARRIVALS = 4.0
MEMORY_SHARE = 0.24
"""Weights and activations take 0.228 of an instance's memory; what is left holds 23,000 tokens, 18 mean requests."""
HEADROOM_TOKENS = 16
SMALL_DRAM_BYTES = 50e9
"""Of a pool that cannot take preempted sequences in: 300 blocks. Their prompts are computed again."""


def run(out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The same requests three times: in peace, four times as fast with little memory, and with little DRAM besides."""
    requests = options.requests or REQUESTS
    write_load(out / "azure-overload.csv", requests, RATE_PER_DECODE * DECODE)
    common = [
        "backend=sim",
        "model=llama3-70b",
        "hardware=h800x8",
        f"cluster={PREFILL}p{DECODE}d",
        "workload=azure",
        "workload.path=azure-overload.csv",
        "slo=paper",
    ]
    hard = [
        f"workload.rate_scale={ARRIVALS}",
        f"backend.memory_share={MEMORY_SHARE}",
        f"engine.headroom_tokens={HEADROOM_TOKENS}",
    ]
    cases = {
        "normal": [],
        "overload_swap": hard,
        "overload_recompute": [*hard, f"kvpool.dram_bytes={SMALL_DRAM_BYTES:.0f}"],
    }
    result: dict[str, Any] = {"requests": requests}
    for name, overrides in cases.items():
        say(f"overload: {name}, {requests:,} requests")
        done = simulate(out, f"overload-{name}", [*common, *overrides], count_events=True)
        result[name] = {
            **done.row(),
            "preemptions": done.events.get("preempt", 0),
            "retries": done.events.get("retry", 0) + done.events.get("recompute", 0),
            "events": done.events,
        }
    for name in ("overload_swap", "overload_recompute"):
        ratio = result[name]["cpu_per_request_us"] / result["normal"]["cpu_per_request_us"]
        result[name]["cpu_per_request_ratio"] = ratio
        say(f"overload: {name}: {ratio:.2f} x the CPU a request, {result[name]['preemptions']:,} preemptions")
    return result
