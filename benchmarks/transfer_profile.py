"""`profile`: what each system spends its time on, while it does nothing else than one case.

`perf` samples both sides, user and kernel, where the kernel lets it; `strace -c -f` counts system calls.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measure import say
from transfer_pairs import Pair
from transfer_systems import Plan

MOST_ROWS = 8
LINE = re.compile(r"^\s*([\d.]+)%\s+(\S+)\s+\[(.)\]\s+(.+?)(?:\s+-)*\s*$")
CALLS = re.compile(r"^\s*([\d.]+)\s+([\d.]+)\s+(\d+)\s+(\d+)\s+(?:\d+\s+)?(\w+)\s*$")


def run(found: dict[str, Pair], options: argparse.Namespace) -> dict[str, Any]:
    """By system and case: the functions that most samples fell in on either side, and the commonest system calls."""
    sizes = options.block_bytes
    middle = sizes[len(sizes) // 2]
    plans = {f"single {sizes[0]}": Plan(sizes[0], 1, 64), f"batch {middle}": Plan(middle, options.batch, 1)}
    rows: list[dict[str, Any]] = []
    for system, pair in found.items():
        for case, plan in plans.items():
            say(f"  {system}, {case}")
            rows.append({"system": system, "case": case, **_watched(pair, plan, options.seconds)})
    return {"seconds": options.seconds, "rows": rows, "tools": {tool: bool(shutil.which(tool)) for tool in _TOOLS}}


_TOOLS = ("perf", "strace")


def _watched(pair: Pair, plan: Plan, seconds: int) -> dict[str, Any]:
    sides = {"reader": pair.reader} | ({"peer": pair.peer} if pair.peer is not None else {})
    with pair.turn() as reader, tempfile.TemporaryDirectory() as folder:
        watchers = {name: _perf(process.pid, Path(folder) / name, seconds) for name, process in sides.items()}
        times = reader.ask("loop", plan=asdict(plan), seconds=seconds + 2.0)
        samples = {name: _report(watcher, Path(folder) / name) for name, watcher in watchers.items()}
        tracers = {name: _strace(process.pid, Path(folder) / f"{name}.calls") for name, process in sides.items()}
        traced = reader.ask("loop", plan=asdict(plan), seconds=2.0)
        calls = {name: _calls(tracer, Path(folder) / f"{name}.calls") for name, tracer in tracers.items()}
    return {
        "gb": times * plan.nbytes / 1e9,
        "samples": samples,
        "calls_per_block": {
            name: {call: count / max(1, traced * plan.batch * plan.batches) for call, count in found.items()}
            for name, found in calls.items()
        },
    }


def _perf(pid: int, file: Path, seconds: int) -> subprocess.Popen[bytes] | None:
    if not shutil.which("perf"):
        return None
    command = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "999", "-o", str(file), "-p", str(pid)]
    return subprocess.Popen(
        [*command, "--", "sleep", str(seconds)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def _report(watcher: subprocess.Popen[bytes] | None, file: Path) -> list[dict[str, Any]]:
    """Shares of samples, by object and function."""
    if watcher is None:
        return []
    watcher.wait()
    command = ["perf", "report", "-i", str(file), "--stdio", "--no-children", "--sort", "dso,symbol", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [match for line in done.stdout.splitlines() if (match := LINE.match(line))]
    return [
        {"percent": float(line[1]), "object": Path(line[2]).name, "kernel": line[3] == "k", "function": line[4]}
        for line in lines[:MOST_ROWS]
    ]


def _strace(pid: int, file: Path) -> subprocess.Popen[bytes] | None:
    if not shutil.which("strace"):
        return None
    command = ["strace", "-c", "-f", "-q", "-o", str(file), "-p", str(pid)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _calls(tracer: subprocess.Popen[bytes] | None, file: Path) -> dict[str, int]:
    """How often each system call was made, the commonest first."""
    if tracer is None:
        return {}
    tracer.terminate()
    tracer.wait()
    text = file.read_text() if file.exists() else ""
    found = {match[5]: int(match[4]) for line in text.splitlines() if (match := CALLS.match(line))}
    found.pop("total", None)
    return dict(sorted(found.items(), key=lambda one: -one[1])[:5])
