"""An SSD tier small enough for tests, whose bytes follow from the blocks' keys: so any byte can be told right or wrong.

Imports neither jax nor pytest: the children that are killed in mid-write are made from this.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mcjax.kvpool.base import BlockStore
from mcjax.kvpool.keys import KeyTable
from mcjax.kvpool.stores.host import HostStore
from mcjax.kvpool.stores.ssd.store import SsdStore
from mcjax.transfer.base import Copy, CopyResult
from mcjax.transfer.transports.disk import Disk
from mcjax.transfer.transports.file import FileTransport
from mcjax.transfer.transports.threaded import checksum
from mcjax.types import KVFormat, KVGroup, NullRecorder

BLOCK_BYTES = 5000
"""No multiple of a page, so that slots have padding; tests of direct I/O say 8192."""
FORMAT = KVFormat("tiny-model", 4, (KVGroup(bytes_per_token=1250),))
SPACE = hashlib.sha256(b"a namespace").digest()


def key_of(chain: int, depth: int) -> bytes:
    """The key of a chain's block at `depth`; its parent is that at `depth - 1`."""
    return hashlib.sha256(b"chain %d depth %d" % (chain, depth)).digest()


def payload_of(key: bytes, nbytes: int = BLOCK_BYTES) -> bytes:
    return hashlib.shake_128(key).digest(nbytes)


class HostRows(BlockStore, Protocol):
    """A store whose bytes are in host memory."""

    def buffer(self) -> NDArray[np.uint8]: ...


class SsdTier:
    """A folder's store, a host memory beside it, and a transport between them."""

    def __init__(
        self,
        folder: Path,
        capacity: int = 8,
        block_bytes: int = BLOCK_BYTES,
        kv_format: KVFormat = FORMAT,
        host_slots: int = 8,
        slab_bytes: int | None = 4 * 12288,
        disk: Disk | None = None,
        recorder: NullRecorder | None = None,
        host: HostRows | None = None,
        threads: int = 2,
        **patience: Any,
    ):
        self.table = KeyTable()
        self.host: HostRows = host or HostStore("n", host_slots, block_bytes)
        self.store = SsdStore("n", folder, capacity, block_bytes, kv_format, self.table, slab_bytes=slab_bytes)
        self.transport = FileTransport(recorder, threads=threads, disk=disk, **patience)
        self.transport.register(self.host)
        self.transport.register(self.store)

    def blocks(self, chain: int, depths: Sequence[int]) -> tuple[int, ...]:
        return self.table.intern([key_of(chain, depth) for depth in depths], SPACE)

    def fill(self, keys: Sequence[bytes], first: int = 0) -> list[bytes]:
        """Put the keys' bytes into host slots from `first` on; returns their checksums."""
        for slot, key in enumerate(keys, first):
            self.host.buffer()[slot] = np.frombuffer(payload_of(key, self.host.block_bytes), np.uint8)
        return [checksum(self.host.buffer()[slot]) for slot in range(first, first + len(keys))]

    def staged(self, chain: int, depths: Sequence[int], first: int = 0) -> Copy:
        """Host slots that hold a run of a chain, SSD slots reserved and staged for it, and the copy between them."""
        slots = self.store.reserve(len(depths))
        sums = self.fill([key_of(chain, depth) for depth in depths], first)
        self.store.stage(slots, self.blocks(chain, depths), sums, self._parent(chain, depths))
        return Copy(self.host.regions(range(first, first + len(depths))), self.store.regions(slots))

    def commit(self, copy: Copy, chain: int, depths: Sequence[int]) -> list[int]:
        """What was staged has arrived; returns its slots."""
        slots = list(copy.target.slots)
        sums = [checksum(self.host.buffer()[slot]) for slot in copy.source.slots]
        self.store.commit(slots, self.blocks(chain, depths), sums, self._parent(chain, depths))
        return slots

    def put(self, chain: int, depths: Sequence[int]) -> list[int]:
        """Write a run of a chain and commit it; returns its slots."""
        copy = self.staged(chain, depths)
        [result] = self.run(copy)
        if result.error is not None:
            raise result.error
        return self.commit(copy, chain, depths)

    def _parent(self, chain: int, depths: Sequence[int]) -> int | None:
        return self.blocks(chain, [depths[0] - 1])[0] if depths[0] else None

    def read(self, slots: Sequence[int]) -> CopyResult:
        """The slots' bytes into the first host slots, which held something else."""
        self.host.buffer()[: len(slots)] = 0xAB
        copy = Copy(self.store.regions(slots), self.host.regions(range(len(slots))), checksum=True)
        [result] = self.run(copy)
        return result

    def run(self, *copies: Copy) -> list[CopyResult]:
        async def main() -> list[CopyResult]:
            return await asyncio.wait_for(self.transport.submit(list(copies)).future, 60)

        return asyncio.run(main())

    def checksum(self, slot: int) -> bytes:
        """That which a committed slot's header tells."""
        header = self.store.header(slot)
        assert header is not None
        return header.checksum

    def served(self) -> dict[bytes, bool]:
        """Every recovered block whose checksum is right, and whether its bytes are those that its key stands for."""
        right: dict[bytes, bool] = {}
        for one in self.store.recovered():
            result = self.read([one.slot])
            if result.error is None and result.checksums == (one.checksum,):
                key = self.table.key(one.block)
                right[key] = self.host.buffer()[0].tobytes() == payload_of(key, self.host.block_bytes)
        return right

    def close(self) -> None:
        self.transport.close()
        self.store.close()
