"""`host`: blocks into a node's host memory and out of it, against `memcpy` between the same buffers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from engine_timing import Contestant, interleaved, speedup
from kvpool_way import Way, copied, random_bytes
from measure import say

from mcjax.kvpool.stores.host import HostStore
from mcjax.transfer.transports.local import Local

BLOCK_BYTES, BATCH, ROUNDS = 2**20, 64, 30


def run(_out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """For each size: bytes a second of `memcpy`, and of put and get with and without checksums; ratios by round."""
    batch, rounds = options.batch or BATCH, options.rounds or ROUNDS
    rows = [measured(nbytes, batch, rounds) for nbytes in options.block_bytes or [BLOCK_BYTES]]
    return {"batch": batch, "rounds": rounds, "rows": rows}


def measured(block_bytes: int, batch: int, rounds: int) -> dict[str, Any]:
    """One block size. Every put goes to the same slots, which `memcpy` writes and reads as well."""
    say(f"host: {batch} blocks of {block_bytes:,} bytes, {rounds} rounds")
    outside, store = HostStore("node", batch, block_bytes, "outside"), HostStore("node", batch, block_bytes)
    random_bytes(outside, 0)
    local = Local()
    way = Way(store, outside, [local], range(1, batch + 1))
    way.put(True)
    slots, places = way.slots(), range(batch)
    way.forget()
    ours, theirs = store.buffer(), outside.buffer()
    contestants = {"memcpy in": Contestant(lambda: copied(theirs, places, ours, slots))}
    for verified, name in ((False, "unverified"), (True, "verified")):
        contestants[f"put {name}"] = Contestant(lambda verified=verified: way.put(verified), way.forget)
    put = interleaved(contestants, rounds)
    way.put(True)
    contestants = {"memcpy out": Contestant(lambda: copied(ours, slots, theirs, places))}
    for verified, name in ((False, "unverified"), (True, "verified")):
        contestants[f"get {name}"] = Contestant(lambda verified=verified: way.get(verified))
    got = interleaved(contestants, rounds)
    local.close()
    way.close()
    timings = {**put, **got}
    nbytes = batch * block_bytes
    return {
        "block_bytes": block_bytes,
        "sides": {
            name: {
                "median_bytes_per_s": nbytes / timing.median_s,
                "best_bytes_per_s": nbytes / timing.best_s,
                "ratio": speedup(timing, timings["memcpy in" if name in put else "memcpy out"]),
            }
            for name, timing in timings.items()
        },
    }
