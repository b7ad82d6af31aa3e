"""How fast bytes move between processes here, beside their limits and their rivals: `python benchmarks/transfer.py`;
docs/benchmarks-transfer.md.

Figures go to FOLDER/results.json with the commands they come from, a plot beside it, progress to stderr, tables to
stdout. A part that is run again replaces its figures and leaves those of the others.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transfer_profile
from measure import BenchmarkError, machine, say
from simulator import positive, store, stored
from transfer_pairs import Memory, Pair, pairs
from transfer_rounds import cases, checked, latencies, sampled, summary
from transfer_systems import SYSTEMS, Plan
from transfer_tables import draw, tables

SIZES = [2**16, 2**18, 2**20, 2**22, 2**24]
AGAINST = ("memcpy", "raw socket", "process_vm_readv", "NIXL", "Mooncake")


def throughput(found: dict[str, Pair], options: argparse.Namespace) -> dict[str, Any]:
    """Each size, one block at a time and in batches, unverified and verified."""
    plans = cases(options.block_bytes, options.batch, options.sample_bytes, options.buffer_bytes)
    wrong = checked(found, plans)
    right = {name: pair for name, pair in found.items() if name not in wrong}
    samples = sampled(right, plans, options.rounds, verified=True)
    return {"batch": options.batch, "rounds": options.rounds, "rows": summary(samples, AGAINST), "left_out": wrong}


def spans(found: dict[str, Pair], options: argparse.Namespace) -> dict[str, Any]:
    """Many small blocks in one batch against as many bytes in large blocks."""
    small, large = min(options.block_bytes), max(options.block_bytes)
    plans = {
        "spans": Plan(small, options.spans, 1),
        "large blocks": Plan(large, max(1, options.spans * small // large), 1),
    }
    wrong = checked(found, plans)
    right = {name: pair for name, pair in found.items() if name not in wrong}
    rounds = max(1, options.rounds // 3)
    samples = sampled(right, plans, rounds, verified=False)
    rows = summary(samples, AGAINST)
    for name in right:
        rates = [[one["nbytes"] / one["wall_s"] for one in samples[name, case]] for case in plans]
        share = sorted(few / many for few, many in zip(*rates, strict=True))[len(rates[0]) // 2]
        next(row for row in rows if (row["system"], row["case"]) == (name, "spans"))["of_large"] = share
    about = {"count": options.spans, "block_bytes": small, "large_bytes": large, "rounds": rounds}
    return {**about, "rows": rows, "left_out": wrong}


def latency(found: dict[str, Pair], options: argparse.Namespace) -> dict[str, Any]:
    """64 bytes at a time: the median and the 99th of a hundred, over all rounds."""
    read = latencies(found, 64, options.reads, options.rounds)
    rows: list[dict[str, Any]] = []
    for system, rounds in read.items():
        every = sorted(one for found_s in rounds for one in found_s)
        medians = [sorted(one)[len(one) // 2] for one in rounds]
        rows.append(
            {
                "system": system,
                "median_us": 1e6 * every[len(every) // 2],
                "best_round_us": 1e6 * min(medians),
                "p99_us": 1e6 * every[len(every) * 99 // 100],
            }
        )
    return {"nbytes": 64, "reads": options.reads, "rounds": options.rounds, "rows": rows}


PARTS = {
    "throughput": throughput,
    "spans": spans,
    "latency": latency,
    "profile": transfer_profile.run,
}


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="transfer.py", description="How fast bytes move between processes here.")
    names = ", ".join(PARTS)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{names}; all but profile if none is named")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"), help="folder of results and plots")
    parser.add_argument("--systems", nargs="+", metavar="SYSTEM", help=f"of {', '.join(map(repr, SYSTEMS))}")
    parser.add_argument("--rounds", type=positive, default=9, help="timed rounds of each system; spans: a third of it")
    parser.add_argument("--block-bytes", type=positive, nargs="+", default=SIZES, help="sizes of a block")
    parser.add_argument("--batch", type=positive, default=64, help="blocks in a batch, if the buffer holds so many")
    parser.add_argument("--spans", type=positive, default=10_000, help="spans: blocks in one batch")
    parser.add_argument("--reads", type=positive, default=500, help="latency: reads in a round")
    parser.add_argument("--sample-bytes", type=positive, default=2**26, help="moved for one figure, or a batch if more")
    parser.add_argument("--buffer-bytes", type=positive, default=2**28, help="memory that blocks are read from")
    parser.add_argument("--seconds", type=positive, default=2, help="profile: how long each system is watched")
    parser.add_argument("--profile", action="store_true", help="the part profile as well")
    options = parser.parse_args(arguments)
    for option, given, known in (("part", options.parts, PARTS), ("system", options.systems or [], SYSTEMS)):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"no {option} {', '.join(unknown)}; there are {', '.join(known)}")
    options.parts = options.parts or [part for part in PARTS if part != "profile"]
    if options.profile and "profile" not in options.parts:
        options.parts.append("profile")
    if max(options.block_bytes) * 2 > options.buffer_bytes:
        parser.error("the largest block must go into the buffer twice")
    return options


def main(arguments: Sequence[str]) -> int:
    options = parsed(arguments)
    out: Path = options.out.absolute()
    logs = out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "benchmarks/transfer.py", *arguments])
    failed = False
    memory = Memory(options.buffer_bytes)
    try:
        with pairs(options.systems or list(SYSTEMS), memory, logs) as (found, missing):
            for system, why in missing.items():
                say(f"{system} is left out: {why}")
            for name in options.parts:
                say(f"{name}: {', '.join(found)}")
                try:
                    figures = PARTS[name](found, options)
                except BenchmarkError as problem:
                    say(f"{name}: {problem}")
                    failed = True
                    continue
                about = {"command": command, "machine": machine(), "load": os.getloadavg()[0], "missing": missing}
                store(out, name, {**about, **figures})
    finally:
        memory.close()
    results = stored(out)
    print(tables(results), end="")
    draw(results, out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
