"""`scale`: what a request costs to simulate as the cluster grows and the load of each instance stays the same."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from azure_load import write_load
from measure import measured, say
from simulated import simulate

REQUESTS = 1_000_000
INSTANCES = (16, 64, 256, 1000)
RATE_PER_PREFILL = 5.0
"""Requests a second for each prefill instance: it computes 30 % of the time, a decode instance has 12 sequences."""
FEWEST = 20_000
"""Requests in a small cluster's run, so that the start of the process does not count for much."""
PROFILED = Path(__file__).with_name("profiled_run.py")


def run(out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The largest cluster takes all requests; the others as many as arrive there in the same time, or `FEWEST`."""
    requests = options.requests or REQUESTS
    sizes: list[int] = sorted(options.instances or INSTANCES)
    rows: list[dict[str, Any]] = []
    for instances in sizes:
        count = max(round(requests * instances / sizes[-1]), min(requests, FEWEST))
        say(f"scale: {count:,} requests on {instances:,} instances")
        overrides = prepared(out, instances, count)
        started = simulate(out, f"scale-start-{instances}", [*overrides, "workload.limit=1"]).usage
        done = simulate(out, f"scale-{instances}", overrides)
        rows.append(
            {
                "instances": instances,
                "start_cpu_s": started.cpu_s,
                "more_cpu_per_request_us": 1e6 * (done.usage.cpu_s - started.cpu_s) / done.submitted,
                **done.row(),
            }
        )
    result: dict[str, Any] = {"rate_per_prefill_instance": RATE_PER_PREFILL, "rows": rows}
    if options.profile:
        result["profile"] = compared(out, sizes, min(requests, options.profile_requests))
    return result


def prepared(out: Path, instances: int, requests: int) -> list[str]:
    """Write the load of a cluster of so many instances, half of them prefill; the overrides that play it."""
    prefill = instances // 2
    name = f"azure-{instances}.csv"
    write_load(out / name, requests, RATE_PER_PREFILL * prefill)
    return [
        "backend=sim",
        "model=llama3-70b",
        "hardware=h800x8",
        f"cluster={prefill}p{instances - prefill}d",
        "workload=azure",
        f"workload.path={name}",
        "slo=paper",
        "track.level=requests",
    ]


def compared(out: Path, sizes: list[int], requests: int) -> dict[str, Any]:
    """Own time of each function a request, in the smallest and the largest cluster, the largest growth first."""
    own: dict[int, dict[str, dict[str, float]]] = {}
    for instances in (sizes[0], sizes[-1]):
        say(f"scale: profile of {requests:,} requests on {instances:,} instances")
        target = f"profile-{instances}.json"
        overrides = prepared(out, instances, requests)
        measured(
            [sys.executable, str(PROFILED), target, *overrides, "track=none"],
            out,
            out / "logs" / f"profile-{instances}.log",
            f"python benchmarks/profiled_run.py {target} {' '.join(overrides)} track=none",
        )
        own[instances] = json.loads((out / target).read_text())
    few, many = own[sizes[0]], own[sizes[-1]]
    nothing = {"own_s": 0.0, "calls": 0.0}
    functions = [
        {
            "function": name,
            "own_us": 1e6 * value["own_s"] / requests,
            "calls": value["calls"] / requests,
            "own_us_smallest": 1e6 * few.get(name, nothing)["own_s"] / requests,
            "calls_smallest": few.get(name, nothing)["calls"] / requests,
        }
        for name, value in many.items()
    ]
    functions.sort(key=lambda row: row["own_us_smallest"] - row["own_us"])
    return {
        "instances": sizes[-1],
        "smallest": sizes[0],
        "requests": requests,
        "total_us": 1e6 * sum(value["own_s"] for value in many.values()) / requests,
        "total_us_smallest": 1e6 * sum(value["own_s"] for value in few.values()) / requests,
        "functions": functions[:30],
    }
