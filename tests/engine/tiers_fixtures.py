"""A node of two tiers with real bytes on the virtual loop: pools, saving and promotion, and nothing above them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from mcjax import aio
from mcjax.backends.check.faults import FaultCounts, Faults
from mcjax.backends.check.store import ByteStore, DiskStore
from mcjax.backends.check.transport import CheckTransport
from mcjax.backends.virtual import VirtualLoop
from mcjax.engine.below import TierBelow
from mcjax.engine.node import Node
from mcjax.engine.promotion import Promotion
from mcjax.engine.saving import Saving
from mcjax.kvpool.base import Tiering
from mcjax.kvpool.eviction.lru import LRU
from mcjax.kvpool.holds import Pin
from mcjax.kvpool.pool import Pool
from mcjax.kvpool.watermark.static import Static
from mcjax.transfer.engine import TransferEngine
from mcjax.types import NS_PER_S, BlockId, NullRecorder, Tier

T = TypeVar("T")

MS = NS_PER_S // 1000
BLOCK_BYTES = 16


def payload(block: BlockId) -> NDArray[np.uint8]:
    """What a block's bytes are, wherever it lies: `[BLOCK_BYTES]`."""
    return np.frombuffer(hashlib.blake2b(block.to_bytes(8, "little"), digest_size=BLOCK_BYTES).digest(), np.uint8)


def digest(data: NDArray[np.uint8]) -> bytes:
    return xxhash.xxh3_128_digest(data.tobytes())


class Events(NullRecorder):
    """Keeps kinds of events, tiers, numbers of blocks and details."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, int, str]] = []

    def event(self, time_ns: int, kind: str, request_id: int, place: str, **values: Any) -> None:
        self.rows.append((kind, str(values.get("tier", "")), values.get("blocks", 0), values.get("detail", "")))

    def blocks(self, kind: str, tier: str) -> int:
        """Blocks of all events of a kind in a tier."""
        return sum(count for found, where, count, _ in self.rows if (found, where) == (kind, tier))


class TieredNode:
    """`ssd` takes the place of the node's disk, if it is given: then the node begins with what is there."""

    def __init__(
        self,
        tiering: Tiering,
        dram_blocks: int,
        ssd_blocks: int,
        faults: Faults = Faults(),  # noqa: B008  (frozen)
        span_blocks: int = 4,
        seed: int = 0,
        disk: DiskStore | None = None,
        wait_s: float = 2.0,
    ):
        self.loop = VirtualLoop()
        self.events = Events()
        self.counts = FaultCounts()
        self.outages_ns: dict[str, int] = {}
        self.memory = ByteStore("n", Tier.DRAM, dram_blocks, BLOCK_BYTES)
        self.disk = disk or DiskStore("n", ssd_blocks, BLOCK_BYTES)
        rng = np.random.default_rng(seed)
        transport = CheckTransport("device", lambda a, b: True, faults, self.counts, rng, self.outages_ns)
        engine = TransferEngine([transport], self.events, deadline_s=0.2)
        for store in (self.memory, self.disk):
            engine.register(store)
        self.dram, self.ssd = (
            Pool("n", store, LRU(), Static(), self.events, NS_PER_S) for store in (self.memory, self.disk)
        )
        self.node = Node("n", self.dram, engine, round(wait_s * NS_PER_S), self.ssd)
        self.below = TierBelow(self.node, self.ssd, 300 * MS)
        self.below.span_blocks = span_blocks
        self.saving = Saving(self.node, self.below, tiering, self.events)
        self.dram.room.saver = self.saving
        self.promotion = Promotion(self.node, self.below, tiering.exclusive, self.events, self.saving.on_shed)
        self.node.promotion = self.promotion

    def run(self, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `main` beside the node's procedures; afterwards nothing may be held."""

        async def beside() -> T:
            async with aio.Scope("node") as scope:
                scope.spawn(self.saving.run(), "saving")
                result = await scope.run(main())
                await self.settled()
                return result

        result = self.loop.run(beside)
        self.check()
        for pool in (self.dram, self.ssd):
            pool.check_idle()
        return result

    def check(self) -> None:
        for pool in (self.dram, self.ssd):
            pool.check_integrity()

    async def settled(self) -> None:
        """Until nothing is on its way down, and no late answer can come any more."""
        while self.node.engine.in_flight or not self.saving.idle:
            await aio.sleep_ns(10 * MS)

    async def write(self, blocks: Sequence[BlockId], owner: int = 0) -> Pin:
        """What a prompt leaves behind: the blocks of its chain that are not in host memory are computed. The pin on all
        of them is the caller's."""
        pin = self.dram.pin(owner, blocks)
        try:
            reservation = await self.node.reserve_at(self.node, owner, len(blocks) - len(pin))
            try:
                first = len(pin)
                new = blocks[first:]
                data = [payload(block) for block in new]
                for slot, row in zip(reservation.slots, data, strict=True):
                    self.memory.buffer()[slot] = row
                parent = blocks[first - 1] if first else None
                if new:
                    self.dram.commit(reservation, new, parent, [digest(row) for row in data])
                    self.dram.deepen(pin, blocks)
            finally:
                self.dram.release(reservation)
        except BaseException:
            self.dram.release(pin)
            raise
        return pin

    async def fetch(self, blocks: Sequence[BlockId], owner: int = 0) -> tuple[Pin, str]:
        """A pin on what host memory has of a chain, and the SSD beyond; and why that stopped short, if it did."""
        pin, problem = self.dram.pin(owner, blocks), ""
        try:
            there = self.promotion.reach(blocks)
            if there > len(pin):
                problem = await self.promotion.promote(owner, pin, blocks[:there])
        except BaseException:
            self.dram.release(pin)
            raise
        return pin, problem

    def verified(self, pin: Pin) -> int:
        """How many of the pinned blocks are what they should be; what is not is dropped, as whoever loads it does.

        Raises `AssertionError` for a wrong byte that its checksum would not tell.
        """
        for depth, block in enumerate(pin.blocks):
            if block not in self.dram:
                return depth
            (slot,) = self.dram.region((block,)).slots
            data, (recorded,) = self.memory.buffer()[slot], self.dram.checksums((block,))
            if digest(data) != recorded:
                self.dram.drop((block,))
                return depth
            assert np.array_equal(data, payload(block)), f"block {block} has the bytes of another"
        return len(pin)

    async def make_room(self, blocks: int) -> None:
        """So many slots of host memory are free for a moment. With all of them, whatever nobody holds has left it."""
        self.dram.release(await self.node.reserve_at(self.node, -2, blocks))
