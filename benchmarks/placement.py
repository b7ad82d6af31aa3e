"""`placement`: what one decision costs on a large cluster with a full directory, and what its parts cost.

Measured in a process of its own: `python placement.py TARGET '{"instances": 1000, ...}'`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from measure import measured, say

INSTANCES, BLOCKS, PLACEMENTS = 1000, 10_000_000, 2_000
WARM_UP = 200
ROUNDS = 5
CHAIN, BLOCK_TOKENS = 256, 512


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
    """Every strategy of `conf/GROUP` that its file alone can make, and why others are left out."""
    import yaml

    made: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    folder = files("mcjax").joinpath("conf", *group.split("/"))
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


@dataclass(frozen=True)
class Timed:
    """CPU microseconds of a call: the mean of all, and of the cheapest round, which other load disturbed least."""

    mean_us: float
    least_us: float


def timed(calls: Mapping[str, Callable[[int], object]], count: int, warm_up: int = WARM_UP) -> dict[str, Timed]:
    """`count` calls `call(index)` of each, after `warm_up` others, in rounds that take turns."""
    for call in calls.values():
        for index in range(warm_up):
            call(index)
    each = -(-count // ROUNDS)
    means: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS):
        for name, call in calls.items():
            first = warm_up + turn * each
            start_ns = time.process_time_ns()
            for index in range(first, first + each):
                call(index)
            means[name].append((time.process_time_ns() - start_ns) / each / 1e3)
    return {name: Timed(sum(values) / len(values), min(values)) for name, values in means.items()}


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
    prompts = cluster.prompts(WARM_UP + sizes.placements + ROUNDS)
    state, recorder, slo = cluster.state, NullRecorder(), SLO(30.0, 0.1)
    prefills, no_prefill = built_in("sched/prefill")
    decodes, no_decode = built_in("sched/decode")

    def placing(prefill: Any, decode: Any) -> Callable[[int], object]:
        strategies = Strategies(prefill, decode, Cheapest(), AdmitAll(), Static())
        rng = np.random.default_rng(0)

        def one(index: int) -> object:
            request, blocks = prompts[index]
            return place(request, blocks, slo, state, strategies, rng, cluster.now_ns, recorder)

        return one

    def view(index: int) -> object:
        request, blocks = prompts[index]
        return state.view(cluster.now_ns, request.prompt_tokens, blocks)

    pairs = {(prefill, decode): f"{prefill}, {decode}" for prefill in prefills for decode in decodes}
    calls = {name: placing(prefills[pair[0]], decodes[pair[1]]) for pair, name in pairs.items()}
    calls["view"] = view
    calls["match"] = lambda index: state.directory.prefix_blocks(prompts[index][1])
    found = timed(calls, sizes.placements)
    return {
        "directory_blocks": len(state.directory),
        "prompt_blocks": sum(len(blocks) for _, blocks in prompts) / len(prompts),
        "place": [
            {"prefill": prefill, "decode": decode, **asdict(found[name])} for (prefill, decode), name in pairs.items()
        ],
        "skipped": {**no_prefill, **no_decode},
        "view": asdict(found["view"]),
        "directory_match": asdict(found["match"]),
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

    async def measure() -> dict[str, Timed]:
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

        calls = {
            "match": lambda index: pool.match(blocks[index % chains]),
            "pin_and_release": pin,
            "match_pin_and_release": match_and_pin,
            "name_trace_blocks": lambda index: table.intern_trace(b"space", blocks[index % chains]),
        }
        return timed(calls, sizes.placements)

    table = KeyTable()
    found = VirtualLoop().run(measure)
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 2**31 - 1, (8, CHAIN * BLOCK_TOKENS), dtype=np.int32)
    hashing = {"hash": lambda index: keys_from_tokens(b"space", prompts[index % 8], BLOCK_TOKENS)}
    found |= timed(hashing, max(1, sizes.placements // 10), 8)
    return {"pool_blocks": CHAIN * chains, **{name: asdict(value) for name, value in found.items()}}


def main(target: str, told: str) -> None:
    sizes = Sizes(**json.loads(told))
    measured_here = {**asdict(sizes), **decisions(sizes), "pool": pool_and_names(sizes)}
    Path(target).write_text(json.dumps(measured_here))


def columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Decode selections in the order of the rows."""
    return list(dict.fromkeys(row["decode"] for row in rows))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
