"""Put and get of a batch of blocks by the way that a run takes: a pool, its store, and the transfer engine between."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import BlockCorrupt
from mcjax.kvpool.base import BlockStore
from mcjax.kvpool.eviction.lru import LRU
from mcjax.kvpool.pool import Pool
from mcjax.kvpool.stores.host import HostStore
from mcjax.kvpool.watermark.static import Static
from mcjax.transfer.base import Copy, Transport
from mcjax.transfer.engine import TransferEngine
from mcjax.types import NS_PER_S, BlockId, NullRecorder

T = TypeVar("T")


class Way:
    """`batch` blocks go from a memory beside the pool into it (`put`) and back (`get`), as one span.

    `verified`: a checksum of every block is taken on the way in, and compared on the way out.
    """

    def __init__(
        self, store: BlockStore, outside: HostStore, transports: Sequence[Transport], blocks: Sequence[BlockId]
    ):
        # The loop that the real world runs on.
        self._runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)
        self.store, self.outside, self.blocks = store, outside, tuple(blocks)
        self._engine = TransferEngine(transports, NullRecorder())
        for memory in (store, outside):
            self._engine.register(memory)
        self.pool = self.run(self._make())
        self._checksums: tuple[bytes, ...] = ()

    async def _make(self) -> Pool:
        return Pool("node", self.store, LRU(), Static(), NullRecorder(), 10 * NS_PER_S)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def put(self, verified: bool) -> None:
        self.run(self._put(verified))

    def get(self, verified: bool) -> None:
        self.run(self._get(verified))

    async def _put(self, verified: bool) -> None:
        count = len(self.blocks)
        room = self.pool.reserve(0, count)
        try:
            self.store.stage(room.slots, self.blocks, self._checksums or (b"",) * count, None)
            source = self.outside.regions(range(count))
            checksums = await self._engine.move(Copy(source, self.store.regions(room.slots), checksum=verified))
            self.pool.commit(room, self.blocks, None, checksums or (b"",) * count)
        finally:
            self.pool.release(room)

    async def _get(self, verified: bool) -> None:
        pin = self.pool.pin(0, self.blocks)
        try:
            target = self.outside.regions(range(len(self.blocks)))
            checksums = await self._engine.move(Copy(self.pool.region(self.blocks), target, checksum=verified))
            if verified and checksums != self.pool.checksums(self.blocks):
                raise BlockCorrupt("what came back is not what was put there", 0, self.blocks[0])
        finally:
            self.pool.release(pin)

    def forget(self) -> None:
        """The blocks leave the pool; their slots are free for the next put."""
        self.run(self._forget())

    async def _forget(self) -> None:
        self.pool.drop(self.blocks)

    def slots(self) -> tuple[int, ...]:
        """Where the blocks lie now."""
        return self.run(self._slots())

    async def _slots(self) -> tuple[int, ...]:
        return self.pool.region(self.blocks).slots

    def close(self) -> None:
        self._runner.close()


def copied(source: NDArray[np.uint8], reads: Sequence[int], target: NDArray[np.uint8], writes: Sequence[int]) -> None:
    """`memcpy` of rows of `source` to rows of `target`, one after the other."""
    nbytes = source.shape[1]
    froms = [source.ctypes.data + row * source.strides[0] for row in reads]
    tos = [target.ctypes.data + row * target.strides[0] for row in writes]
    for origin, end in zip(froms, tos, strict=True):
        ctypes.memmove(end, origin, nbytes)


def random_bytes(memory: HostStore, seed: int) -> None:
    """Fill a memory with bytes that no compression and no zero page makes cheap."""
    buffer = memory.buffer()
    np.copyto(buffer, np.random.default_rng(seed).integers(0, 256, buffer.shape, np.uint8))
