"""How fast the pool and its tiers are here: `python benchmarks/kvpool.py PART --out FOLDER`; docs/benchmarks-kvpool.md.

Figures go to FOLDER/results.json with the commands they come from, a plot beside it, progress to stderr, tables to
stdout. A part that is run again replaces its figures and leaves those of the others.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import kvpool_host
import kvpool_peers
import kvpool_pool
import kvpool_ssd
from kvpool_tables import tables
from measure import BenchmarkError, machine, say
from simulator import positive, store, stored

PARTS = {
    "host": kvpool_host.run,
    "ssd": kvpool_ssd.run,
    "peers": kvpool_peers.run,
    **{part: partial(kvpool_pool.run, part) for part in kvpool_pool.PARTS},
}


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kvpool.py", description="How fast the pool and its tiers are here.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all of them if none is named")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"), help="folder of results and plots")
    parser.add_argument("--rounds", type=positive, help="timed rounds of each contestant")
    parser.add_argument("--batch", type=positive, help="host, ssd, peers: blocks that move together")
    parser.add_argument("--block-bytes", type=positive, nargs="+", help="host, ssd, peers: sizes of a block")
    parser.add_argument("--disk", type=Path, help="ssd: folder on the disk that is meant; the one of --out by itself")
    parser.add_argument("--pool-blocks", type=positive, help="pool: blocks that lie in it")
    parser.add_argument("--directory-blocks", type=positive, help="directory: blocks that it knows")
    parser.add_argument("--nodes", type=positive, help="directory: nodes that hold them")
    parser.add_argument("--calls", type=positive, help="pool, eviction: measured calls of each kind")
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
        command = shlex.join(["python", "benchmarks/kvpool.py", *arguments])
        store(out, name, {"command": command, "machine": machine(), "load": os.getloadavg()[0], **figures})
    results = stored(out)
    print(tables(results), end="")
    if results:
        from kvpool_tables import draw

        draw(results, out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
