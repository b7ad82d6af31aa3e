"""Looks into a folder of blocks without a lock and without changing anything, also while a run uses it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import xxhash

from mcjax.errors import StoreError
from mcjax.kvpool.stores.ssd.files import Slabs
from mcjax.kvpool.stores.ssd.header import HEADER_BYTES, BlockHeader
from mcjax.kvpool.stores.ssd.lock import holder
from mcjax.kvpool.stores.ssd.manifest import Manifest, padded, read_manifest


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """One slot as it was found: a header, or else `damage`, or else it has never held a block."""

    slot: int
    header: BlockHeader | None
    damage: str = ""


class FolderReader:
    """A folder of blocks, open for reading. A context manager; `close` ends it."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder = folder
        self.manifest = manifest
        self._layout = manifest.layout
        try:
            self._slabs = Slabs(folder, manifest, write=False)
        except OSError as problem:
            raise StoreError(f"{problem.filename or folder} cannot be read: {problem.strerror}") from None
        self._page = mmap.mmap(-1, padded(manifest.block_bytes))

    def __enter__(self) -> FolderReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def used_by(self) -> str:
        """Who has the folder open for writing at this moment ("process 17 on host"); nothing if nobody has."""
        return holder(self.folder)

    def headers(self) -> Iterator[SlotHeader]:
        """Every slot in order; one sector of disk each. Of several headers with one key the highest `sequence` counts.

        A header of another layout than the folder's is damage.
        """
        for slot, header, damage in self._slabs.headers():
            yield self._judged(slot, header, damage)

    def header(self, slot: int) -> SlotHeader:
        """One slot as it is now."""
        return self._judged(slot, *self._slabs.header(slot))

    def _judged(self, slot: int, header: BlockHeader | None, damage: str) -> SlotHeader:
        manifest = self.manifest
        if header is not None and (header.layout != self._layout or header.payload_bytes != manifest.block_bytes):
            return SlotHeader(slot, None, "the block has another layout than its folder")
        return SlotHeader(slot, header, damage)

    def read_payload(self, slot: int) -> memoryview:
        """`[block_bytes]` bytes of a slot, valid until the next call; fewer where the file ends. Raises `OSError`."""
        descriptor, offset = self._slabs.place(slot)
        got = os.preadv(descriptor, [self._page], offset + HEADER_BYTES)
        return memoryview(self._page)[: min(got, self.manifest.block_bytes)]

    def verify(self, found: SlotHeader) -> str:
        """Read a found block and compare its checksum: "sound", "damaged", or "changed" if its slot has been given to
        another block since. While a run writes, a slot under the pen may look damaged: then ask again a moment later.
        """
        assert found.header is not None
        try:
            payload = self.read_payload(found.slot)
            right = xxhash.xxh3_128(payload).digest() == found.header.checksum
            if right and len(payload) == self.manifest.block_bytes:
                return "sound"
            return "damaged" if self.header(found.slot).header == found.header else "changed"
        except OSError:
            return "damaged"

    def close(self) -> None:
        self._slabs.close()


def open_folder(path: Path) -> FolderReader:
    """Open one node's folder of blocks. Raises `StoreError` where there is none, or none that can be understood."""
    manifest = read_manifest(path)
    if manifest is None:
        raise StoreError(f"{path} holds no SSD tier (no manifest.json); name one node's folder below kvpool.ssd_path")
    return FolderReader(path, manifest)
