"""Every store that needs no jax keeps to the suite: sizes only, small arrays, a slab, files."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mcjax.backends.check.store import ByteStore
from mcjax.kvpool.encodings.base import BlockLayout
from mcjax.kvpool.encodings.int8 import Int8
from mcjax.kvpool.keys import KeyTable
from mcjax.kvpool.stores.host import HostStore
from mcjax.kvpool.stores.null import NullStore
from mcjax.kvpool.stores.slots import SlotStore
from mcjax.kvpool.stores.ssd.store import SsdStore
from mcjax.transfer.base import Copy
from mcjax.transfer.transports.file import FileTransport
from mcjax.transfer.transports.threaded import checksum
from mcjax.types import KVFormat, KVGroup, Tier
from store_suite import CAPACITY, Counter, content, machine


class Sizes(Counter):
    """A store without bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.store = NullStore("n", Tier.DRAM, CAPACITY, 64)

    def write(self, slots: Sequence[int], blocks: Sequence[int], parent: int | None) -> list[bytes]:
        return [b""] * len(slots)

    def read(self, slot: int) -> None:
        return None

    def close(self) -> None:
        pass


class InMemory(Counter):
    """A store whose bytes anybody can reach."""

    def __init__(self, store: SlotStore):
        super().__init__()
        self.store = store

    def write(self, slots: Sequence[int], blocks: Sequence[int], parent: int | None) -> list[bytes]:
        buffer = self.store.buffer()
        assert buffer is not None
        for slot, block in zip(slots, blocks, strict=True):
            buffer[slot] = content(block, self.store.block_bytes)
        return [checksum(buffer[slot]) for slot in slots]

    def read(self, slot: int) -> bytes:
        buffer = self.store.buffer()
        assert buffer is not None
        return buffer[slot].tobytes()

    def close(self) -> None:
        if isinstance(self.store, HostStore):
            self.store.close()


class InFiles:
    """The SSD's store: bytes go by way of the file transport, and so does what is read."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._table = KeyTable()
        self._named = 0
        kv_format = KVFormat("tiny", 4, (KVGroup(bytes_per_token=1250),))
        self.store = SsdStore("n", Path(self._folder.name) / "n", CAPACITY, 5000, kv_format, self._table)
        self._host = HostStore("n", CAPACITY, 5000)
        self._file = FileTransport(threads=1)
        self._file.register(self.store)
        self._file.register(self._host)

    def blocks(self, count: int) -> list[int]:
        keys = [b"key %028d" % number for number in range(self._named, self._named + count)]
        self._named += count
        return list(self._table.intern(keys))

    def write(self, slots: Sequence[int], blocks: Sequence[int], parent: int | None) -> list[bytes]:
        rows = range(len(slots))
        for row, block in zip(rows, blocks, strict=True):
            self._host.buffer()[row] = content(block, self.store.block_bytes)
        checksums = [checksum(self._host.buffer()[row]) for row in rows]
        self.store.stage(slots, blocks, checksums, parent)
        assert self._move(Copy(self._host.regions(rows), self.store.regions(slots), checksum=True)) == checksums
        return checksums

    def read(self, slot: int) -> bytes:
        self._host.buffer()[0] = 0
        self._move(Copy(self.store.regions([slot]), self._host.regions([0])))
        return self._host.buffer()[0].tobytes()

    def _move(self, copy: Copy) -> list[bytes]:
        async def main() -> list[bytes]:
            [result] = await self._file.submit([copy]).future
            assert result.error is None
            return list(result.checksums)

        return asyncio.run(main())

    def close(self) -> None:
        self._file.close()
        self.store.close()
        self._folder.cleanup()


LAYOUT = BlockLayout("float32", 2, 4, 4)

TestNullStore = machine(Sizes, 100)
TestByteStore = machine(lambda: InMemory(ByteStore("n", Tier.SSD, CAPACITY, 100)), 50)
TestHostStore = machine(lambda: InMemory(HostStore("n", CAPACITY, 100)), 50)
TestPoisonedHostStore = machine(lambda: InMemory(HostStore("n", CAPACITY, 4096, poison=True)), 25)
TestEncodedHostStore = machine(
    lambda: InMemory(HostStore("n", CAPACITY, LAYOUT.quantised_bytes, packer=Int8(LAYOUT))), 25
)
TestSsdStore = machine(InFiles, 8, 15)
