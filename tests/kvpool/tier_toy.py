"""One node in virtual time: a real pool over one link to what is below it, and requests that bring their blocks.

The closed loop that a watermark strategy acts in, without prompts being computed by turns: fast enough for many loads.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from mcjax import aio
from mcjax.backends.virtual import VirtualLoop
from mcjax.errors import PoolFull
from mcjax.kvpool.base import Watermark
from mcjax.kvpool.eviction.lru import LRU
from mcjax.kvpool.pool import Pool
from mcjax.kvpool.stores.slots import SlotStore
from mcjax.types import NS_PER_S, BlockId, NullRecorder, Tier

SPAN = 4
"""Blocks a move."""


@dataclass(frozen=True)
class Arrival:
    at_ns: int
    blocks: tuple[BlockId, ...]


@dataclass
class Outcome:
    by_request: dict[int, float] = field(default_factory=dict[int, float])
    """Seconds from a request's arrival until all its blocks are there, by its number."""
    hits: int = 0
    loaded: int = 0
    computed: int = 0
    levels: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """When a reservation asked, and how full the tier could get."""

    @property
    def mean_s(self) -> float:
        return math.fsum(self.by_request.values()) / len(self.by_request)


class Observed:
    """A watermark strategy, and what it said."""

    def __init__(self, inner: Watermark, outcome: Outcome):
        self._inner, self._outcome = inner, outcome

    def levels(self, reading: object) -> tuple[float, float]:
        low, high = self._inner.levels(reading)  # pyright: ignore[reportArgumentType]
        self._outcome.levels.append((aio.now_ns(), high))
        return low, high


class Below:
    """The tier below: takes any number of blocks, over a link that moves one thing at a time."""

    def __init__(self, pool: Pool, block_ns: int):
        self.pool, self.block_ns = pool, block_ns
        self.blocks: dict[BlockId, None] = {}
        self._queue: OrderedDict[BlockId, None] = OrderedDict()
        self._loads: list[tuple[int, aio.Signal]] = []
        self._wake = aio.Signal("below")

    def unsaved(self, blocks: Sequence[BlockId]) -> Sequence[BlockId]:
        return [block for block in blocks if block not in self.blocks]

    def save(self, blocks: Sequence[BlockId]) -> None:
        self._queue.update(dict.fromkeys(block for block in blocks if block not in self.blocks))
        self._wake.set()

    def on_insert(self, blocks: Sequence[BlockId], parent: BlockId | None) -> None:
        """Nothing goes down before it must leave."""

    def on_hit(self, blocks: Sequence[BlockId]) -> None:
        """Nor when it was hit."""

    def on_remove(self, blocks: Sequence[BlockId]) -> None:
        """What leaves was saved."""

    async def load(self, count: int) -> None:
        done = aio.Signal("load")
        self._loads.append((count, done))
        self._wake.set()
        await done.wait()

    async def run(self) -> None:
        reading = self.pool.room.reading
        while True:
            if self._loads:  # somebody waits for them
                count, done = self._loads.pop(0)
                await aio.sleep_ns(count * self.block_ns)
                done.set()
            elif self._queue:
                span = [self._queue.popitem(last=False)[0] for _ in range(min(SPAN, len(self._queue)))]
                reading.saving = len(self._queue) + len(span)
                await aio.sleep_ns(len(span) * self.block_ns)
                self.blocks.update(dict.fromkeys(span))
                reading.saved += len(span)
                reading.busy_ns += len(span) * self.block_ns
                reading.saving, reading.save_ns = len(self._queue), self.block_ns
                self.pool.wake()
            else:
                await self._wake.wait()


def play(
    arrivals: Sequence[Arrival],
    watermark: Watermark,
    capacity: int,
    save_ns: int,
    compute_ns: int = 0,
    hold_ns: int = NS_PER_S // 10,
) -> Outcome:
    """Each request finds what it can, has the rest brought up or computes it (`compute_ns` a block, one after the
    other), and holds all for `hold_ns`."""
    outcome = Outcome()

    async def main() -> None:
        store = SlotStore("n", Tier.DRAM, capacity, 64)
        pool = Pool("n", store, LRU(), Observed(watermark, outcome), NullRecorder(), 10**12)
        below = Below(pool, save_ns)
        pool.room.saver = below
        async with aio.Scope("toy") as scope:
            worker = scope.spawn(below.run(), "below")

            async def serve(number: int, blocks: tuple[BlockId, ...]) -> None:
                start_ns = aio.now_ns()
                pin = pool.pin(number, blocks)
                found = len(pin)
                there = found
                while there < len(blocks) and blocks[there] in below.blocks:
                    there += 1
                pool.note_hits(found / len(blocks))
                missing = blocks[found:]
                taken = []

                def attempt() -> bool:
                    try:
                        taken.append(pool.reserve(number, len(missing)))
                    except PoolFull:
                        return False
                    return True

                await pool.space.until(attempt)
                if there > found:
                    await below.load(there - found)
                await aio.sleep_ns((len(blocks) - there) * compute_ns)
                outcome.by_request[number] = (aio.now_ns() - start_ns) / NS_PER_S
                outcome.hits += found
                outcome.loaded += there - found
                outcome.computed += len(blocks) - there
                if missing and pool.commit(taken[0], missing, blocks[found - 1] if found else None) is not None:
                    pool.deepen(pin, blocks)
                await aio.sleep_ns(hold_ns)
                pool.release(taken[0])
                pool.release(pin)

            tasks = []
            for number, arrival in enumerate(arrivals):
                await aio.sleep_until_ns(arrival.at_ns)
                tasks.append(aio.spawn(serve(number, arrival.blocks), f"r{number}"))
            for task in tasks:
                await task
            pool.check_integrity()
            pool.check_idle()
            worker.cancel()

    VirtualLoop().run(main)
    return outcome
