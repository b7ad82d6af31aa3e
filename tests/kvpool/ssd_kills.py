"""Kills a process that writes blocks to a folder as fast as it can, again and again, and looks what the folder serves.

`python ssd_kills.py FOLDER KILLS SEED` prints counts as JSON. Children are forked from a process that has imported
nothing but the store, so that a kill costs milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mcjax.transfer.transports.disk import PAGE_BYTES, Disk
from ssd_fixtures import SsdTier, key_of

CAPACITY = 48
BLOCK_BYTES = 65536
RUN = 4
WRITERS = 3


class Torn(Disk):
    """Writes the pages of a slot one by one in any order, as a disk may that loses its power: so a kill tears it."""

    def __init__(self, rng: random.Random):
        self._rng = rng

    def write(self, file: int, views: Sequence[memoryview], offset: int) -> int:
        pages: list[tuple[int, memoryview]] = []
        for view in views:
            for start in range(0, len(view), PAGE_BYTES):
                pages.append((offset, view[start : start + PAGE_BYTES]))
                offset += PAGE_BYTES
        self._rng.shuffle(pages)
        for at, page in pages:
            os.pwrite(file, page, at)
        return sum(map(len, views))


def open_tier(folder: Path, disk: Disk | None = None) -> SsdTier:
    slab_bytes = 16 * (BLOCK_BYTES + PAGE_BYTES)
    return SsdTier(folder, CAPACITY, BLOCK_BYTES, host_slots=RUN * WRITERS, slab_bytes=slab_bytes, disk=disk)


def write_until_killed(folder: Path, seed: int, told: int) -> None:
    """Chains of `RUN` blocks, each in place of one written before. Tells of chains when they are durable, and before
    their slots are written over."""
    rng = random.Random(seed)
    tier = open_tier(folder, Torn(rng) if seed % 2 else None)
    left = [one.slot for one in tier.store.recovered()]
    rng.shuffle(left)
    tier.store.free(left)
    runs: list[tuple[int, list[int]]] = []
    chains = iter(range(10000 * seed, 10000 * (seed + 1)))
    os.write(told, b"open\n")

    async def write(first: int) -> None:
        while True:
            while tier.store.free_slots < RUN:
                gone, slots = runs.pop(rng.randrange(len(runs)))
                os.write(told, b"-%d\n" % gone)
                tier.store.free(slots)
            chain = next(chains)
            copy = tier.staged(chain, range(RUN), first)
            [result] = await tier.transport.submit([copy]).future
            if result.error is not None:
                raise result.error
            runs.append((chain, tier.commit(copy, chain, range(RUN))))
            os.write(told, b"+%d\n" % chain)

    async def main() -> None:
        await asyncio.gather(*(write(RUN * number) for number in range(WRITERS)))

    asyncio.run(main())


def one_kill(folder: Path, seed: int, after_s: float) -> tuple[list[int], int]:
    """Returns the chains that the killed process had made durable and not given up, and how many it wrote in all."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        write_until_killed(folder, seed, theirs)
        os._exit(1)
    os.close(theirs)
    with open(ours, encoding="ascii") as told:
        told.readline()
        time.sleep(after_s)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the child must have been killed, not have ended"
        durable: dict[int, None] = {}
        written = 0
        for line in told:
            if line.startswith("+") and line.endswith("\n"):
                durable[int(line[1:])] = None
                written += 1
            elif line.startswith("-"):
                del durable[int(line[1:])]
    return list(durable), written


def main(folder: Path, kills: int, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    counts = {"kills": 0, "served": 0, "wrong": 0, "missing": 0, "torn": 0, "damaged": 0, "written": 0}
    open_tier(folder).close()
    for number in range(kills):
        durable, written = one_kill(folder, seed * kills + number + 1, rng.uniform(0, 0.08))
        tier = open_tier(folder)
        counts["damaged"] += tier.store.damaged
        found = CAPACITY - tier.store.free_slots
        served = tier.served()
        tier.close()
        counts["torn"] += found - len(served)
        counts["kills"] += 1
        counts["served"] += len(served)
        counts["wrong"] += list(served.values()).count(False)
        counts["missing"] += sum(key_of(chain, depth) not in served for chain in durable for depth in range(RUN))
        counts["written"] += RUN * written
    return counts


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
