"""The SSD tier of one node. It keeps the books; payload and headers are written by the `file` transport."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from mcjax.errors import ConfigError, IntegrityError, StoreError
from mcjax.kvpool.base import Stored
from mcjax.kvpool.keys import KeyTable
from mcjax.kvpool.stores.slots import SlotStore
from mcjax.kvpool.stores.ssd.files import Slabs, allocate
from mcjax.kvpool.stores.ssd.header import HEADER_BYTES, BlockHeader, encode, space_digest
from mcjax.kvpool.stores.ssd.lock import FolderLock
from mcjax.kvpool.stores.ssd.manifest import Manifest, read_manifest
from mcjax.kvpool.stores.ssd.scan import latest, parents_first
from mcjax.types import BlockId, KVFormat, Packer, Tier

_LEAST_SLAB_BYTES = 1 << 30
_MOST_SLABS = 64


class SsdStore(SlotStore):
    """`capacity` slots of `block_bytes` bytes in preallocated files of a folder, which nobody else may write to.

    What it held when its last process ended, however that was, it holds again: see `recovered`. A slot is written by
    one operation, header and payload together, and counts once that is durable; a block that was written in part shows
    by its header's checksum when the folder is opened, or by its payload's when it is read.
    """

    head_bytes = HEADER_BYTES
    """Of the header in front of each payload; what the `file` transport has to leave room for."""

    def __init__(
        self,
        node: str,
        folder: Path,
        capacity: int,
        block_bytes: int,
        kv_format: KVFormat,
        table: KeyTable,
        encoding: str = "none",
        lossy: bool = False,
        slab_bytes: int | None = None,
        name: str = "",
        packer: Packer | None = None,
    ):
        """Opens `folder`, or makes it; a folder of another capacity grows, or loses the slots at its end.

        Args:
            capacity: slots; `fitting_slots` says how many go into so many bytes of disk.
            block_bytes: of a payload as it is stored.
            table: gives keys for block ids, and ids for the keys that are found.
            encoding: what the payload is encoded with, beside the layout in `kv_format`, where no `packer` says.
            lossy: payloads may have lost bits before they come here.
            slab_bytes: of one file of a new folder; None: a 64th of all, at least 1 GiB.

        Raises:
            StoreError: the folder is in use, of another model, layout or version, or has no room.
        """
        if block_bytes < 1:
            raise ConfigError("block_bytes", block_bytes, "must be at least 1")
        if capacity < 1:
            raise ConfigError("kvpool.ssd_bytes", capacity, "has room for no block")
        super().__init__(node, Tier.SSD, capacity, block_bytes, name, packer)
        encoding = encoding if packer is None else packer.name
        lossy = self.lossy = lossy or self.lossy
        self.folder = folder
        self._table = table
        self._spaces: dict[bytes, bytes] = {}
        self._staged: dict[int, BlockHeader] = {}
        self._suspects: dict[int, None] = {}
        self.damaged = 0
        """Slots whose header was broken when the folder was opened."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(folder)
        except OSError as problem:
            raise StoreError(f"{folder} cannot be written to: {problem.strerror}; check kvpool.ssd_path") from None
        try:
            self.manifest = _settle(folder, Manifest(kv_format, encoding, lossy, block_bytes, capacity, 1), slab_bytes)
            self.slot_bytes = self.manifest.slot_bytes
            self._layout = self.manifest.layout
            self._slabs = Slabs(folder, self.manifest, write=True)
            self._sequence = 0
            self._found = self._scan()
        except OSError as problem:
            self._lock.close()
            raise StoreError(f"{folder} cannot be used: {problem.strerror or problem}; check kvpool.ssd_path") from None
        except StoreError:
            self._lock.close()
            raise

    @property
    def direct(self) -> bool:
        """Whether blocks go past the page cache."""
        return self._slabs.direct

    def _scan(self) -> list[Stored]:
        sound: list[BlockHeader] = []
        for _, header, damage in self._slabs.headers():
            if header is None:
                self.damaged += bool(damage)
                continue
            self._sequence = max(self._sequence, header.sequence + 1)
            if header.layout == self._layout and header.payload_bytes == self.block_bytes:
                sound.append(header)
        found: list[Stored] = []
        for header in parents_first(latest(sound)):
            block = self._table.intern([header.key])[0]
            parent = None if header.parent is None else self._table.intern([header.parent])[0]
            found.append(Stored(header.slot, block, parent, header.checksum))
            self._headers[header.slot] = (block, header.checksum)
        self._free = [slot for slot in self._free if slot not in self._headers]
        return found

    def recovered(self) -> Sequence[Stored]:
        """Blocks whose headers were whole, and whose prefixes are there: parents first, and else as they were written.

        Their payloads have not been read: whoever reads one compares its checksum.
        """
        found, self._found = self._found, []
        return found

    def stage(
        self, slots: Sequence[int], blocks: Sequence[BlockId], checksums: Sequence[bytes], parent: BlockId | None
    ) -> None:
        """What reserved slots are about to be given: the transport writes it in front of the payloads. A payload whose
        checksum is another is refused on its way; where one is empty, it is taken from the payload."""
        before = None if parent is None else self._table.key(parent)
        for slot, block, checksum in zip(slots, blocks, checksums or [b""] * len(blocks), strict=True):
            key = self._table.key(block)
            self._staged[slot] = BlockHeader(
                slot,
                self._sequence,
                key,
                before,
                self._space(block),
                self._layout,
                self.manifest.kv_format.block_tokens,
                self.block_bytes,
                checksum,
                self.manifest.encoding,
                self.manifest.lossy,
            )
            self._sequence += 1
            before = key

    def _space(self, block: BlockId) -> bytes:
        space = self._table.space(block)
        digest = self._spaces.get(space)
        if digest is None:
            digest = self._spaces[space] = space_digest(space)
        return digest

    def staged_checksum(self, slot: int) -> bytes | None:
        """The checksum a staged slot's payload must have (empty: any); None for a slot that nothing was staged for."""
        header = self._staged.get(slot)
        return None if header is None else header.checksum

    def head(self, slot: int, checksum: bytes) -> bytes | None:
        """The sector to write in front of a payload of that checksum; None for a slot that nothing was staged for."""
        header = self._staged.get(slot)
        return None if header is None else encode(header.with_checksum(checksum))

    def place(self, slot: int) -> tuple[int, int]:
        """Descriptor and offset of a slot: header first, payload behind it."""
        return self._slabs.place(slot)

    def commit(
        self,
        slots: Sequence[int],
        blocks: Sequence[BlockId],
        checksums: Sequence[bytes],
        parent: BlockId | None = None,
    ) -> None:
        """The transport has answered, so headers and payloads are durable: they count in memory too."""
        super().commit(slots, blocks, checksums, parent)
        for slot in slots:
            self._staged.pop(slot, None)
            self._suspects.pop(slot, None)

    def free(self, slots: Iterable[int]) -> None:
        """Give slots back. On disk nothing changes before another block is written there."""
        released = list(slots)
        for slot in released:
            self._staged.pop(slot, None)
        super().free(released)

    def summed(self, slot: int) -> bool:
        """Whether the block there was committed with a checksum."""
        found = self._headers.get(slot)
        return found is not None and found[1] != b""

    def suspect(self, slot: int) -> None:
        """The disk could not write there: the slot is given out again only when no other is free. Thread-safe."""
        self._suspects[slot] = None

    def _release(self, slots: list[int]) -> None:
        suspects = [slot for slot in slots if slot in self._suspects]
        if suspects:
            self._free[:0] = suspects  # the list is taken from its end
            slots = [slot for slot in slots if slot not in self._suspects]
        super()._release(slots)

    def wipe(self) -> None:
        super().wipe()
        self._staged.clear()

    def check_integrity(self) -> None:
        super().check_integrity()
        lost = sorted(self._staged.keys() & set(self._free))
        if lost:
            raise IntegrityError(f"{self.name}: slots {lost[:5]} are free while blocks are staged for them")

    def close(self) -> None:
        """Let the folder go. Whatever moves bytes to or from it must have ended: descriptors are used again."""
        self._slabs.close()
        self._lock.close()


def fitting_slots(ssd_bytes: int, block_bytes: int) -> int:
    """How many slots for blocks of `block_bytes` lie in `ssd_bytes` of disk, headers and padding counted."""
    slot_bytes = Manifest(KVFormat("", 1, ()), "none", False, block_bytes, 0, 1).slot_bytes
    return ssd_bytes // slot_bytes


def _settle(folder: Path, wanted: Manifest, slab_bytes: int | None) -> Manifest:
    """Bring the folder's files in line with `wanted`; returns the manifest that now is true.

    At every instant the manifest claims no slot that is not on disk.
    """
    found = read_manifest(folder)
    if found is None:
        nbytes = slab_bytes or max(_LEAST_SLAB_BYTES, wanted.capacity * wanted.slot_bytes // _MOST_SLABS)
        fresh = replace(wanted, slab_slots=max(1, nbytes // wanted.slot_bytes))
        allocate(folder, fresh)
        fresh.write(folder)
        return fresh
    differences = found.differences(wanted)
    if differences:
        raise StoreError(
            f"{folder} holds other blocks: {'; '.join(differences)}. Name another folder (kvpool.ssd_path), or delete "
            "this one if its blocks are not needed"
        )
    changed = replace(found, capacity=wanted.capacity)
    if changed.capacity < found.capacity:
        changed.write(folder)
    allocate(folder, changed)
    if changed.capacity > found.capacity:
        changed.write(folder)
    return changed
