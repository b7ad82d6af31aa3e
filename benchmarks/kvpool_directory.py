"""The conductor's directory alone: memory, and what matching, reports, replicas and a lost node cost.

`figures` is called by `kvpool.py directory`; `python benchmarks/kvpool_directory.py '{"blocks": 5000000}'` prints it.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placement import timed

if TYPE_CHECKING:
    from mcjax.kvpool.directory import Directory

CHAIN = 256
"""Blocks of a prompt that is matched."""
SPANS = (1, 16, 64, 256)
SPAN = 32
"""Blocks that a report of the filling names together."""


@dataclass(frozen=True)
class Sizes:
    nodes: int = 1000
    blocks: int = 5_000_000
    holders: Sequence[int] = (1, 2, 20)
    """Nodes that hold each block; the directory is filled once for each figure here."""
    calls: int = 2_000


def figures(sizes: Sizes) -> dict[str, Any]:
    """Of one directory after another, each with more holders a block: everything."""
    return {**asdict(sizes), "rows": [_row(sizes, holders) for holders in sizes.holders]}


def _row(sizes: Sizes, holders: int) -> dict[str, Any]:
    gc.collect()
    before = resident_bytes()
    start_s = time.process_time()
    directory, chains = filled(sizes, holders)
    fill_s = time.process_time() - start_s
    gc.collect()
    grown = resident_bytes() - before
    steps = timed(_steps(directory, chains), sizes.calls)
    start_s = time.process_time()
    directory.drop_node(0)
    return {
        "holders": holders,
        "blocks": len(directory),
        "grown_bytes": grown,
        "bytes_per_block": grown / len(directory),
        "fill_us_per_report": fill_s / (holders * sizes.blocks / SPAN) * 1e6,
        "drop_node_s": time.process_time() - start_s,
        **{name: asdict(value) for name, value in steps.items()},
    }


def filled(sizes: Sizes, holders: int) -> tuple[Directory, Sequence[Sequence[int]]]:
    """A directory in which every span is on so many nodes, drawn anew for each, and the prompts to be matched: chains
    of which nodes hold different lengths."""
    from mcjax.kvpool.directory import Directory

    draw = random.Random(0)
    directory = Directory()
    for index in range(sizes.nodes):
        directory.node_index(f"n{index}")
    nodes = range(sizes.nodes)
    for first in range(0, sizes.blocks, SPAN):
        span = range(first, first + SPAN)
        for node in draw.sample(nodes, min(holders, sizes.nodes)):
            directory.add(node, span)
    chains = [range(first, first + CHAIN) for first in range(0, min(sizes.blocks - CHAIN, CHAIN * 64), CHAIN)]
    for chain in chains:  # as of a conversation: half the nodes began it, ever fewer went on
        for node in draw.sample(nodes, len(nodes) // 2):
            directory.add(node, chain[: draw.randrange(CHAIN)])
        directory.add(draw.choice(nodes), chain)
    return directory, chains


def _steps(directory: Directory, chains: Sequence[Sequence[int]]) -> dict[str, Callable[[int], object]]:
    fresh = 10**12

    def reported(span: int) -> Callable[[int], object]:
        def one(index: int) -> None:
            nonlocal fresh
            fresh += span
            directory.add(index % 7, range(fresh, fresh + span))

        return one

    return {
        f"match_{CHAIN}": lambda index: directory.prefix_blocks(chains[index % len(chains)]),
        f"replicas_{CHAIN}": lambda index: directory.holders_of(chains[index % len(chains)]),
        **{f"report_{span}": reported(span) for span in SPANS},
    }


def resident_bytes() -> int:
    """What the process holds now; where the system does not say, its peak so far."""
    status = Path("/proc/self/status")
    if status.exists():
        held = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
        return int(held.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    told = json.loads(sys.argv[1]) if sys.argv[1:] else {}
    print(json.dumps(figures(Sizes(**told)), indent=1))
