"""How fast the simulator is: `python benchmarks/simulator.py PART --out FOLDER`; `docs/benchmarks.md` has the parts.

Figures go to FOLDER/results.json with the commands they come from, plots beside it, progress to stderr, tables to
stdout. A part that is run again replaces its figures and leaves those of the others.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import conv2x
import overload
import placement
import scale
from measure import BenchmarkError, machine, say
from tables import tables

PARTS = {"conv2x": conv2x.run, "scale": scale.run, "overload": overload.run, "placement": placement.run}


def positive(text: str) -> int:
    value = int(text.replace("_", ""))
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {value}")
    return value


def even(text: str) -> int:
    value = positive(text)
    if value % 2:
        raise argparse.ArgumentTypeError(f"must be even: half of the instances prefill, half decode, not {value}")
    return value


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="simulator.py", description="How fast the simulator is; docs/benchmarks.md has the parts."
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all of them if none is named")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"), help="folder of results and plots")
    parser.add_argument("--requests", type=positive, help="fewer requests than a part has by itself")
    parser.add_argument("--instances", type=even, nargs="+", help="cluster sizes of scale; placement takes the largest")
    parser.add_argument("--repeats", type=positive, default=2, help="conv2x: runs of each simulator")
    parser.add_argument("--dynosim-python", help="conv2x: an interpreter that has ai-dynamo installed")
    parser.add_argument("--profile", action="store_true", help="scale: which functions grow with the cluster")
    parser.add_argument("--profile-requests", type=positive, default=20_000, help="scale: requests under the profiler")
    parser.add_argument("--blocks", type=positive, help="placement: blocks in the directory")
    parser.add_argument("--placements", type=positive, help="placement: measured calls of each kind")
    options = parser.parse_args(arguments)
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return options


def main(arguments: Sequence[str]) -> int:
    options = parsed(arguments)
    out: Path = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in options.parts or list(PARTS):
        try:
            figures = PARTS[name](out, options)
        except BenchmarkError as problem:
            say(f"{name}: {problem}")
            failed = True
            continue
        command = shlex.join(["python", "benchmarks/simulator.py", *arguments])
        store(out, name, {"command": command, "machine": machine(), **figures})
    results = stored(out)
    print(tables(results), end="")
    if results:
        from plots import draw  # late: a child's peak memory counts its parent's at the fork

        draw(results, out)
    return 1 if failed else 0


def stored(out: Path) -> dict[str, Any]:
    """What earlier parts have left."""
    path = out / "results.json"
    return json.loads(path.read_text()) if path.exists() else {}


def store(out: Path, name: str, figures: dict[str, Any]) -> None:
    whole = json.dumps({**stored(out), name: figures}, indent=1)
    (out / "results.json.part").write_text(whole + "\n")
    (out / "results.json.part").replace(out / "results.json")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
