"""How long `mcjax ls` takes over many runs: `python benchmarks/listing.py --runs 10000`.

The runs are copies of the records of a few real ones, each under its own name, key, time, seed and figures. The figure
to look at is the ratio to reading and parsing the same files and nothing else, which differs less between machines than
seconds do. Files are in the page cache for both.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from measure import BenchmarkError, machine, say

SELECTIONS = ("random", "round_robin", "least_loaded", "cache_aware", "kvcache_centric")
SMALL = ("backend=sim", "workload=synthetic", "hardware=a800x8", "model=llama3-70b", "workload.sessions=6")
LS = "import sys; from mcjax.app.ls import command; sys.exit(command(sys.argv[1:]))"
PLAIN = """
import json, os, sys
base = sys.argv[1]
for name in os.listdir(base):
    with open(f"{base}/{name}/run.json", "rb") as file:
        json.loads(file.read())
"""
COMMANDS: dict[str, tuple[str, ...]] = {
    "the last 30": (),
    "all": ("--all",),
    "all, as csv": ("--all", "--format", "csv"),
    "one selection above a rate": ("sched/prefill=random", "goodput_rps>1", "--all"),
}


def records(folder: Path) -> list[dict[str, Any]]:
    """The records of one real run of each prefill selection."""
    import mcjax

    found: list[dict[str, Any]] = []
    for selection in SELECTIONS:
        overrides = [*SMALL, f"sched/prefill={selection}", f"track.sinks.0.directory={folder}"]
        run = mcjax.run([*overrides, "track.sinks.0.overview=false"], progress=False)
        assert run.directory is not None
        found.append(json.loads((run.directory / "run.json").read_text()))
    return found


def fill(base: Path, count: int, kept: Sequence[dict[str, Any]]) -> None:
    """`count` finished runs, ten seconds apart."""
    rng = random.Random(0)
    first = datetime(2025, 11, 1, tzinfo=UTC)
    for index in range(count):
        started = first + timedelta(seconds=10 * index)
        record = json.loads(json.dumps(kept[index % len(kept)]))
        seed = index // 5 % 20
        record["config"].update({"seed": seed, "workload.seed": seed, "slice": index // 100 % 8, "slices": 8})
        record["config"]["workload.rate_per_s"] = [1.0, 2.0, 4.0][index // 1000 % 3]
        record["headline"] = {name: value * rng.uniform(0.5, 2) for name, value in record["headline"].items()}
        record["run_key"] = hashlib.sha256(str(index).encode()).hexdigest()
        record["started"] = record["ended"] = started.isoformat()
        directory = base / f"{started:%Y-%m-%d_%H-%M-%S}"
        directory.mkdir(parents=True)
        (directory / "run.json").write_text(json.dumps(record, separators=(",", ":")))
        (directory / "DONE").write_text("{}\n")


def seconds(arguments: Sequence[str], repeats: int) -> tuple[float, float]:
    """Of a whole process, the least of some tries: seconds by the clock, and of a processor."""
    times: list[tuple[float, float]] = []
    for _ in range(repeats):
        start_s = time.monotonic()
        process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        times.append((time.monotonic() - start_s, used.ru_utime + used.ru_stime))
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise BenchmarkError(f"exit status {process.returncode}: {arguments}")
    return min(wall_s for wall_s, _ in times), min(cpu_s for _, cpu_s in times)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("listing.py", description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "runs"
        fill(base, options.runs, records(Path(folder) / "real"))
        say(f"{options.runs} runs are there")
        plain = seconds(["-c", PLAIN, str(base)], options.repeats)
        print(json.dumps(machine()))
        print(f"reading and parsing alone: {plain[0]:.2f} s, {plain[1]:.2f} s of a processor")
        for name, words in COMMANDS.items():
            took = seconds(["-c", LS, "--runs", str(base), *words], options.repeats)
            print(f"mcjax ls, {name}: {took[0]:.2f} s, {took[1]:.2f} s of a processor, {took[1] / plain[1]:.2f} x")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
