"""The allocator that every store is made of: equal slots, a free list, and when each slot last changed hands."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import IntegrityError, PoolFull
from mcjax.kvpool.base import Header, Stored
from mcjax.kvpool.encodings.none import AsComputed
from mcjax.transfer.base import Region
from mcjax.transfer.layout.describe import Layout
from mcjax.types import BlockId, Packer, Tier


def _nobody() -> None:
    """Nobody waits for slots to come back."""


class SlotStore:
    """The books of equal slots: what every store is, whether it holds bytes or not.

    `block_bytes` are those of a block at rest: what `packer` makes of one, as they were computed where none is given.
    """

    def __init__(
        self, node: str, tier: Tier, capacity: int, block_bytes: int, name: str = "", packer: Packer | None = None
    ):
        packer = packer or AsComputed(block_bytes)
        if packer.packed_bytes != block_bytes:
            raise ValueError(f"{packer.name} packs into {packer.packed_bytes} bytes, slots have {block_bytes}")
        self.node = node
        self.tier = tier
        self.name = name or f"{node}.{tier}"
        self.capacity = capacity
        self.block_bytes = block_bytes
        self.packer = packer
        self.lossy = packer.lossy
        self.layout: Layout | None = None
        self._free = list(range(capacity - 1, -1, -1))
        self.epoch = 0
        self._changed = [0] * capacity
        """The epoch in which each slot last changed hands."""
        self._headers: dict[int, tuple[BlockId, bytes]] = {}
        self._held: dict[Region, int] = {}
        """Regions that transfers in flight read or write, and how many transfers."""
        self._leaving: dict[int, None] = {}
        self.on_space: Callable[[], None] = _nobody

    def buffer(self) -> NDArray[np.uint8] | None:
        return None

    def changed_since(self, epoch: int, slots: Sequence[int]) -> bool:
        return max(map(self._changed.__getitem__, slots), default=0) > epoch

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def taken_slots(self) -> int:
        """Slots that somebody was given and has not given back."""
        return self.capacity - len(self._free) - len(self._leaving)

    def reserve(self, count: int) -> list[int]:
        if count > len(self._free):
            raise PoolFull(self.name, count, len(self._free))
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        return taken

    def stage(
        self, slots: Sequence[int], blocks: Sequence[BlockId], checksums: Sequence[bytes], parent: BlockId | None
    ) -> None:
        pass

    def recovered(self) -> Sequence[Stored]:
        return ()

    def commit(
        self,
        slots: Sequence[int],
        blocks: Sequence[BlockId],
        checksums: Sequence[bytes],
        parent: BlockId | None = None,
    ) -> None:
        self._headers.update(zip(slots, zip(blocks, checksums, strict=True), strict=True))

    def header(self, slot: int) -> Header | None:
        found = self._headers.get(slot)
        return None if found is None else Header(*found)

    def regions(self, slots: Sequence[int]) -> Region:
        return Region(self, tuple(slots), self.epoch)

    def free(self, slots: Iterable[int]) -> None:
        """Give slots back. One that a transfer still holds is stale at once, but handed out again only when let go."""
        released = list(slots)
        if not released:
            return
        epoch = self.epoch + 1
        changed, headers = self._changed, self._headers
        for slot in released:
            changed[slot] = epoch
        self.epoch = epoch  # last: a thread that still sees the old one will look at the slots again
        if headers:
            deque(map(headers.pop, released, repeat(None)), maxlen=0)
        if self._held:
            held = self._among_held(released)
            if held:
                self._leaving.update(held)
                released = [slot for slot in released if slot not in held]
        if released:
            self._release(released)

    def hold(self, region: Region) -> None:
        """A transfer in flight is a slot's second owner: until `let_go` the slot is not handed out again."""
        self._held[region] = self._held.get(region, 0) + 1

    def let_go(self, region: Region) -> None:
        left = self._held.pop(region) - 1
        if left:
            self._held[region] = left
        elif self._leaving:
            self._come_back([slot for slot in dict.fromkeys(region.slots) if slot in self._leaving])

    def settle(self, slots: Sequence[int]) -> None:
        """Regions made of these slots before are stale; their owner stays."""
        epoch = self.epoch + 1
        for slot in slots:
            self._changed[slot] = epoch
        self.epoch = epoch  # last, as in `free`

    def _come_back(self, slots: list[int]) -> None:
        """Freed slots that a transfer has let go: they are released unless another one holds them as well."""
        held = self._among_held(slots)
        released = [slot for slot in slots if slot not in held]
        for slot in released:
            del self._leaving[slot]
        if released:
            self._release(released)
            self.on_space()

    def _among_held(self, slots: Sequence[int]) -> dict[int, None]:
        """Those of `slots` that a transfer in flight reads or writes."""
        wanted = dict.fromkeys(slots)
        found: dict[int, None] = {}
        for region in self._held:
            # Nearly always nothing, and that is seen at the speed of C: the price of holds that cost nothing a slot.
            if not wanted.keys().isdisjoint(region.slots):
                found.update((slot, None) for slot in region.slots if slot in wanted)
        return found

    def _release(self, slots: list[int]) -> None:
        """The slots belong to nobody now; stores that poison released bytes do it here."""
        self._free.extend(slots)

    def wipe(self) -> None:
        """The memory is lost (its node died): every region ever handed out is stale, and nothing is committed."""
        self._changed = [self.epoch + 1] * self.capacity
        self.epoch += 1
        self._headers.clear()

    def check_integrity(self) -> None:
        free = set(self._free)
        if len(free) != len(self._free):
            raise IntegrityError(f"{self.name}: a slot is on the free list twice")
        if free and not 0 <= min(free) <= max(free) < self.capacity:
            raise IntegrityError(f"{self.name}: a free slot lies outside the store")
        shared = sorted(free & self._headers.keys())
        if shared:
            raise IntegrityError(f"{self.name}: slots {shared[:5]} are both free and committed")
        held = list(self._among_held(self._free))
        if held:
            raise IntegrityError(f"{self.name}: slots {held[:5]} are free while a transfer holds them")

    def check_idle(self) -> None:
        """Raise `IntegrityError` if a transfer still holds a slot, or a freed one has not come back."""
        if self._held or self._leaving:
            held = [slot for region in self._held for slot in region.slots]
            raise IntegrityError(
                f"{self.name}: transfers still hold slots {held[:5]}, "
                f"{len(self._leaving)} freed slots have not come back"
            )
