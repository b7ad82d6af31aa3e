"""`placement`: what one decision costs on a large cluster with a full directory, and what its parts cost.

Measured in a process of its own: `python placement.py TARGET '{"instances": 1000, ...}'`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from measure import measured, say

INSTANCES, BLOCKS, PLACEMENTS = 1000, 10_000_000, 2_000
WARM_UP = 200
CHAIN = 256


@dataclass(frozen=True)
class Sizes:
    instances: int = INSTANCES
    blocks: int = BLOCKS
    placements: int = PLACEMENTS


def run(out: Path, options: argparse.Namespace) -> dict[str, Any]:
    sizes = Sizes(max(options.instances or [INSTANCES]), options.blocks or BLOCKS, options.placements or PLACEMENTS)
    say(f"placement: {sizes.instances:,} instances, {sizes.blocks:,} blocks")
    arguments = ["placement.json", json.dumps(asdict(sizes))]
    usage = measured(
        [sys.executable, __file__, *arguments],
        out,
        out / "logs" / "placement.log",
        f"python benchmarks/placement.py {arguments[0]} '{arguments[1]}'",
    )
    return {"process": usage.row(), **json.loads((out / "placement.json").read_text())}


def built_in(group: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Every strategy of `conf/sched/GROUP` that its file alone can make, and why others are left out."""
    import yaml

    made: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    folder = files("mcjax").joinpath("conf", "sched", group)
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        name = entry.name.removesuffix(".yaml")
        if not entry.name.endswith(".yaml") or name == "custom":
            continue
        values = yaml.safe_load(entry.read_text(encoding="utf-8"))
        module, _, attribute = str(values.pop("_target_")).rpartition(".")
        try:
            made[name] = getattr(importlib.import_module(module), attribute)(**values)
        except Exception as problem:
            skipped[name] = f"{type(problem).__name__}: {problem}"
    return made, skipped


def mean_us(call: Callable[[int], object], count: int, warm_up: int = WARM_UP) -> float:
    """Mean CPU microseconds of `call(index)` over `count` calls, after `warm_up` others."""
    for index in range(warm_up):
        call(index)
    start_ns = time.process_time_ns()
    for index in range(warm_up, warm_up + count):
        call(index)
    return (time.process_time_ns() - start_ns) / count / 1e3


def decisions(sizes: Sizes) -> dict[str, Any]:
    """`place` with every prefill selection x decode selection, and the view and the match inside it alone."""
    import numpy as np
    from full_cluster import FullCluster

    from mcjax.sched.admission.none import AdmitAll
    from mcjax.sched.fetch.cheapest import Cheapest
    from mcjax.sched.placement import Strategies, place
    from mcjax.sched.roles.static import Static
    from mcjax.types import SLO, NullRecorder

    cluster = FullCluster(sizes.instances, sizes.blocks)
    prompts = cluster.prompts(WARM_UP + sizes.placements)
    state, recorder, slo = cluster.state, NullRecorder(), SLO(30.0, 0.1)
    rows: list[dict[str, Any]] = []
    prefills, no_prefill = built_in("prefill")
    decodes, no_decode = built_in("decode")
    for prefill_name, prefill in prefills.items():
        for decode_name, decode in decodes.items():
            strategies = Strategies(prefill, decode, Cheapest(), AdmitAll(), Static())
            rng = np.random.default_rng(0)

            def one(index: int, strategies: Strategies = strategies, rng: np.random.Generator = rng) -> object:
                request, blocks = prompts[index]
                return place(request, blocks, slo, state, strategies, rng, cluster.now_ns, recorder)

            rows.append({"prefill": prefill_name, "decode": decode_name, "mean_us": mean_us(one, sizes.placements)})

    def view(index: int) -> object:
        request, blocks = prompts[index]
        return state.view(cluster.now_ns, request.prompt_tokens, blocks)

    return {
        "directory_blocks": len(state.directory),
        "prompt_blocks": sum(len(blocks) for _, blocks in prompts) / len(prompts),
        "place": rows,
        "skipped": {**no_prefill, **no_decode},
        "view_us": mean_us(view, sizes.placements),
        "directory_match_us": mean_us(lambda index: state.directory.prefix_blocks(prompts[index][1]), sizes.placements),
    }


def pool_and_names(sizes: Sizes) -> dict[str, Any]:
    """Match and pin of 256 blocks in one node's pool, and naming 256 blocks, which is done before."""
    import numpy as np

    from mcjax.backends.virtual import VirtualLoop
    from mcjax.kvpool.eviction.lru import LRU
    from mcjax.kvpool.keys import KeyTable, keys_from_tokens
    from mcjax.kvpool.pool import Pool
    from mcjax.kvpool.stores.slots import SlotStore
    from mcjax.kvpool.watermark.static import Static
    from mcjax.types import NS_PER_S, NullRecorder, Tier

    chains = max(1, sizes.blocks // sizes.instances // CHAIN)
    blocks = [tuple(range(CHAIN * chain, CHAIN * (chain + 1))) for chain in range(chains)]

    async def measure() -> tuple[float, float, float]:
        store = SlotStore("n0", Tier.DRAM, CHAIN * chains, 1)
        pool = Pool("n0", store, LRU(), Static(), NullRecorder(), NS_PER_S)
        for chain in blocks:
            room = pool.reserve(0, CHAIN)
            pool.commit(room, chain, None)
            pool.release(room)

        def pin(index: int) -> None:
            pool.release(pool.pin(index, blocks[index % chains]))

        def match_and_pin(index: int) -> None:
            pool.match(blocks[index % chains])
            pin(index)

        matched_us = mean_us(lambda index: pool.match(blocks[index % chains]), sizes.placements)
        return matched_us, mean_us(pin, sizes.placements), mean_us(match_and_pin, sizes.placements)

    match_us, pin_us, both_us = VirtualLoop().run(measure)
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 2**31 - 1, (8, CHAIN * 512), dtype=np.int32)
    few = max(1, sizes.placements // 10)
    hash_us = mean_us(lambda index: keys_from_tokens(b"space", prompts[index % 8], 512), few, 8)
    table = KeyTable()
    intern_us = mean_us(lambda index: table.intern_trace(b"space", blocks[index % chains]), sizes.placements)
    return {
        "pool_blocks": CHAIN * chains,
        "match_us": match_us,
        "pin_and_release_us": pin_us,
        "match_pin_release_us": both_us,
        "hash_256_blocks_us": hash_us,
        "name_256_trace_blocks_us": intern_us,
    }


def main(target: str, told: str) -> None:
    sizes = Sizes(**json.loads(told))
    measured_here = {**asdict(sizes), **decisions(sizes), "pool": pool_and_names(sizes)}
    Path(target).write_text(json.dumps(measured_here))


def columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Decode selections in the order of the rows."""
    return list(dict.fromkeys(row["decode"] for row in rows))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
