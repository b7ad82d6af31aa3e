"""The real world's SSD tier: a store a node, in a folder of its own, and the transport that reads and writes it."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcjax.backends.base import Tiers
from mcjax.backends.recovered import encode_recovered, mechanism
from mcjax.errors import ConfigError, StoreError, TransferError
from mcjax.kvpool.base import Stored
from mcjax.kvpool.keys import KeyTable
from mcjax.kvpool.stores.host import HostStore
from mcjax.kvpool.stores.ssd.store import SsdStore, fitting_slots
from mcjax.transfer.base import Copy, Transport
from mcjax.transfer.transports.file import FileTransport
from mcjax.types import KVFormat, Packer, Recorder

MEASURED_BYTES, REPEATS = 16 << 20, 3
"""Written and read to find out how fast the disk is, and how often it is read."""


class SsdTier:
    """Makes nothing where a run has no SSD tier. `blocks`: slots of each node, 0 without one."""

    def __init__(
        self,
        tiers: Tiers,
        kv_format: KVFormat,
        table: KeyTable,
        recorder: Recorder,
        packer: Packer,
        lossy_above: bool = False,
    ):
        """`packer`: how blocks rest on SSD; `lossy_above`: whether they may have lost bits on their way there.

        Raises `ConfigError` for a tier too small for one block.
        """
        self._path = tiers.ssd_path
        self._kv_format = kv_format
        self._table = table
        self._recorder = recorder
        self._packer = packer
        self._lossy_above = lossy_above
        self._stores: dict[str, SsdStore] = {}
        self._damaged = 0
        self.blocks = 0
        self._file: FileTransport | None = None
        if self._path is None or tiers.ssd_bytes is None:
            return
        self.blocks = fitting_slots(tiers.ssd_bytes, packer.packed_bytes)
        if not self.blocks:
            problem = f"has no room for one block of {packer.packed_bytes} bytes and its header"
            raise ConfigError("kvpool.ssd_bytes", tiers.ssd_bytes, problem)
        self._file = FileTransport(recorder)

    @property
    def transports(self) -> list[Transport]:
        return [] if self._file is None else [self._file]

    def open(self, nodes: Sequence[str]) -> None:
        """Open the folders of nodes that will be there. Raises `StoreError` for one that cannot be used."""
        for node in nodes:
            self.store(node)

    def store(self, node: str) -> SsdStore | None:
        """The node's store, opened when first asked for. Raises `StoreError` for a folder that cannot be used."""
        if self._path is None or not self.blocks:
            return None
        if node not in self._stores:
            store = self._make(node, self._path / node, self.blocks, self._table)
            self._recorder.outcome(0, mechanism(node), 0, encode_recovered(store.found, self._table))
            self._stores[node] = store
            self._damaged += store.damaged
        return self._stores[node]

    def figures(self) -> dict[str, Any] | None:
        """How the disk did in this run, for its summary; None without one."""
        if self._file is None:
            return None
        stats = self._file.stats()
        return {
            "damaged_headers": self._damaged,
            "device_failures": stats.device_failures,
            "refused": stats.refused,
            "syncs": stats.syncs,
            "unavailable": list(stats.unavailable),
        }

    def _make(self, node: str, folder: Path, blocks: int, table: KeyTable) -> _Reopened:
        packer = self._packer
        return _Reopened(
            node, folder, blocks, packer.packed_bytes, self._kv_format, table, lossy=self._lossy_above, packer=packer
        )

    async def measure(self) -> tuple[float, float] | None:
        """Bytes a second and latency in seconds of reading from the disk, by the way that blocks are read; None without
        a tier. Recorded as the only outcome of the mechanism `ssd`. Raises `StoreError` if it cannot be written to.
        """
        if self._path is None or not self.blocks:
            return None
        with tempfile.TemporaryDirectory(prefix=".measure-", dir=self._path) as folder:
            whole_s, one_s, nbytes = await self._read_times(Path(folder))
        found = (nbytes / whole_s, one_s)
        self._recorder.outcome(0, "ssd", 0, {"bytes_per_s": found[0], "latency_s": found[1]})
        return found

    async def _read_times(self, folder: Path) -> tuple[float, float, int]:
        """Medians of reading many blocks and one block, in seconds, and the bytes of the many."""
        count = max(1, min(self.blocks, MEASURED_BYTES // self._packer.packed_bytes))
        table = KeyTable()
        store = self._make("disk", folder, count, table)
        host = HostStore("disk", count, store.block_bytes, "disk.host", packer=self._packer)
        file = FileTransport()  # whose answers are in no log
        try:
            file.register(store)
            file.register(host)
            slots = store.reserve(count)
            blocks = table.intern([index.to_bytes(32, "little") for index in range(count)])
            store.stage(slots, blocks, (b"",) * count, None)
            here, there = host.regions(range(count)), store.regions(slots)
            await _moved(file, Copy(here, there))
            first = Copy(store.regions(slots[:1]), host.regions([0]))
            times = [(await _moved(file, Copy(there, here)), await _moved(file, first)) for _ in range(REPEATS)]
        except TransferError as problem:
            raise StoreError(f"{self._path} cannot be used: {problem}; check kvpool.ssd_path") from None
        finally:
            file.close()
            store.close()
            host.close()
        whole_s, one_s = (statistics.median(column) for column in zip(*times, strict=True))
        return whole_s, one_s, count * store.block_bytes

    def close(self) -> None:
        """End the transport's threads, after what was submitted; then let the folders go. Harmless when repeated."""
        if self._file is not None:
            self._file.close()
        for store in self._stores.values():
            store.close()
        self._stores.clear()


async def _moved(file: FileTransport, copy: Copy) -> float:
    """Seconds that a copy took. Not by the transfer engine, whose timers would outlast it. Raises `TransferError`."""
    start_s = time.perf_counter()
    (result,) = await file.submit([copy]).future
    if result.error is not None:
        raise result.error
    return time.perf_counter() - start_s


class _Reopened(SsdStore):
    """Tells what it was opened with before the pool asks: a replay has to begin with it."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.found = super().recovered()

    def recovered(self) -> Sequence[Stored]:
        found, self.found = self.found, ()
        return found
