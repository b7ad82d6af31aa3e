"""`pool`, `directory`, `eviction`: what the pool's own steps cost; memory of its books and of the directory.

Measured in a process of its own: `python kvpool_pool.py PART TARGET '{"pool_blocks": 262144, ...}'`.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measure import measured, say
from placement import Timed, built_in, timed

CHAIN = 256
SPANS = (1, 16, 64)
STEADY_BLOCKS, STEADY_SPAN = 16_384, 16


@dataclass(frozen=True)
class Sizes:
    pool_blocks: int = 2**18
    """In the pool that is matched in and pinned in."""
    directory_blocks: int = 5_000_000
    nodes: int = 1000
    calls: int = 2_000


def run(part: str, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    sizes = Sizes(
        options.pool_blocks or Sizes.pool_blocks,
        options.directory_blocks or Sizes.directory_blocks,
        options.nodes or Sizes.nodes,
        options.calls or Sizes.calls,
    )
    say(f"{part}: {sizes}")
    arguments = [part, f"{part}.json", json.dumps(asdict(sizes))]
    shown = f"python benchmarks/kvpool_pool.py {part} {arguments[1]} '{arguments[2]}'"
    usage = measured([sys.executable, __file__, *arguments], out, out / "logs" / f"{part}.log", shown)
    return {"process": usage.row(), **asdict(sizes), **json.loads((out / f"{part}.json").read_text())}


def directory(sizes: Sizes) -> dict[str, Any]:
    """Memory of the conductor's view of a full cluster: everything that the process grew by while it was made."""
    from full_cluster import FullCluster

    FullCluster(4, 2_000)  # what is imported and tabulated once is no part of it
    before = resident_bytes()
    cluster = FullCluster(sizes.nodes, sizes.directory_blocks)
    grown = resident_bytes() - before
    blocks = len(cluster.state.directory)
    return {"blocks": blocks, "nodes": sizes.nodes, "grown_bytes": grown, "bytes_per_block": grown / max(1, blocks)}


def pool(sizes: Sizes) -> dict[str, Any]:
    """Match and pin of a whole chain, inserts, and the memory of a pool's books."""
    from mcjax.backends.virtual import VirtualLoop

    chains = max(2, sizes.pool_blocks // CHAIN)
    blocks = [tuple(range(CHAIN * chain, CHAIN * (chain + 1))) for chain in range(chains)]

    async def measure() -> dict[str, Any]:
        before = resident_bytes()
        pool = pool_of(CHAIN * chains + max(SPANS) * (sizes.calls + 1000), lru())
        for chain in blocks:
            insert(pool, chain)
        grown = resident_bytes() - before
        fresh = iter(range(10**12, 10**13))

        def pin(index: int) -> None:
            pool.release(pool.pin(index, blocks[index % chains]))

        def insertion(span: int) -> Callable[[int], object]:
            return lambda index: insert(pool, tuple(next(fresh) for _ in range(span)))

        calls: dict[str, Callable[[int], object]] = {"match_pin_release": pin}
        timings = timed(calls, sizes.calls)
        for span in SPANS:
            timings |= timed({f"insert_{span}": insertion(span)}, sizes.calls // len(SPANS))
        return {
            "books": {"blocks": CHAIN * chains, "grown_bytes": grown, "bytes_per_block": grown / (CHAIN * chains)},
            **{name: asdict(value) for name, value in timings.items()},
        }

    return VirtualLoop().run(measure)


def eviction(sizes: Sizes) -> dict[str, Any]:
    """A block that comes, is hit once, and drives another out: by strategy, in a pool that is full."""
    from mcjax.backends.virtual import VirtualLoop

    made, skipped = built_in("kvpool/eviction")

    async def measure() -> dict[str, Timed]:
        calls = {name: _steady(strategy) for name, strategy in made.items()}
        return timed(calls, sizes.calls)

    found = VirtualLoop().run(measure)
    rows = [
        {"name": name, "mean_us": one.mean_us / STEADY_SPAN, "least_us": one.least_us / STEADY_SPAN}
        for name, one in found.items()
    ]
    return {"pool_blocks": STEADY_BLOCKS, "span": STEADY_SPAN, "rows": rows, "skipped": skipped}


def _steady(strategy: Any) -> Callable[[int], object]:
    """A full pool; each call inserts a span of a new chain and pins an old one that is still there."""
    pool = pool_of(STEADY_BLOCKS, strategy)
    span = STEADY_SPAN
    for first in range(0, STEADY_BLOCKS, span):
        insert(pool, tuple(range(first, first + span)))
    count = STEADY_BLOCKS // span

    def one(index: int) -> None:
        first = span * (count + index)
        insert(pool, tuple(range(first, first + span)))
        # Of the middle of what came last, so that whoever keeps what is new or was hit has it still.
        old = first - span * (count // 4)
        pool.release(pool.pin(index, tuple(range(old, old + span))))

    return one


def insert(pool: Any, chain: tuple[int, ...]) -> None:
    room = pool.reserve(0, len(chain))
    pool.commit(room, chain, None, (b"",) * len(chain))
    pool.release(room)


def pool_of(blocks: int, strategy: Any) -> Any:
    from mcjax.kvpool.pool import Pool
    from mcjax.kvpool.stores.slots import SlotStore
    from mcjax.kvpool.watermark.static import Static
    from mcjax.types import NS_PER_S, NullRecorder, Tier

    return Pool("n0", SlotStore("n0", Tier.DRAM, blocks, 1), strategy, Static(), NullRecorder(), NS_PER_S)


def lru() -> Any:
    from mcjax.kvpool.eviction.lru import LRU

    return LRU()


def resident_bytes() -> int:
    """Memory that the process has now. Not its peak, which on Linux begins with its parent's at the fork."""
    gc.collect()
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


PARTS = {"pool": pool, "directory": directory, "eviction": eviction}

if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(PARTS[sys.argv[1]](Sizes(**json.loads(sys.argv[3])))))
