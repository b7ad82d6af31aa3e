"""The allocator that every store is made of: equal slots, a free list, a generation a slot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import IntegrityError, PoolFull
from mcjax.kvpool.base import Header
from mcjax.transfer.base import Region
from mcjax.types import BlockId, Tier


def _nobody() -> None:
    """Nobody waits for slots to come back."""


class SlotStore:
    """Slots without bytes: the store of worlds where only sizes exist, and the base of those that hold bytes."""

    def __init__(self, node: str, tier: Tier, capacity: int, block_bytes: int, name: str = ""):
        self.node = node
        self.tier = tier
        self.name = name or f"{node}.{tier}"
        self.capacity = capacity
        self.block_bytes = block_bytes
        self._free = list(range(capacity - 1, -1, -1))
        self._generations = [0] * capacity
        self._headers: dict[int, tuple[BlockId, bytes]] = {}
        self._held: dict[int, int] = {}
        self._leaving: dict[int, None] = {}
        self.on_space: Callable[[], None] = _nobody

    def buffer(self) -> NDArray[np.uint8] | None:
        return None

    def generations(self, slots: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(self._generations.__getitem__, slots))

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

    def commit(self, slots: Sequence[int], blocks: Sequence[BlockId], checksums: Sequence[bytes]) -> None:
        self._headers.update(zip(slots, zip(blocks, checksums, strict=True), strict=True))

    def header(self, slot: int) -> Header | None:
        found = self._headers.get(slot)
        return None if found is None else Header(*found)

    def regions(self, slots: Sequence[int]) -> Region:
        return Region(self, tuple(slots), tuple(map(self._generations.__getitem__, slots)))

    def free(self, slots: Iterable[int]) -> None:
        """Give slots back. One that a transfer still holds is stale at once, but handed out again only when let go."""
        released: list[int] = []
        for slot in slots:
            self._generations[slot] += 1
            self._headers.pop(slot, None)
            if slot in self._held:
                self._leaving[slot] = None
            else:
                released.append(slot)
        if released:
            self._release(released)

    def hold(self, slots: Iterable[int]) -> None:
        """A transfer in flight is a slot's second owner: until `let_go` the slot is not handed out again."""
        held = self._held
        for slot in slots:
            held[slot] = held.get(slot, 0) + 1

    def let_go(self, slots: Iterable[int]) -> None:
        held = self._held
        released: list[int] = []
        for slot in slots:
            left = held[slot] - 1
            if left:
                held[slot] = left
                continue
            del held[slot]
            if slot in self._leaving:
                del self._leaving[slot]
                released.append(slot)
        if released:
            self._release(released)
            self.on_space()

    def _release(self, slots: list[int]) -> None:
        """The slots belong to nobody now; stores that poison released bytes do it here."""
        self._free.extend(slots)

    def wipe(self) -> None:
        """The memory is lost (its node died): every region ever handed out is stale, and nothing is committed."""
        self._generations = [generation + 1 for generation in self._generations]
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
        held = sorted(free & self._held.keys())
        if held:
            raise IntegrityError(f"{self.name}: slots {held[:5]} are free while a transfer holds them")

    def check_idle(self) -> None:
        """Raise `IntegrityError` if a transfer still holds a slot, or a freed one has not come back."""
        if self._held or self._leaving:
            raise IntegrityError(
                f"{self.name}: transfers still hold slots {list(self._held)[:5]}, "
                f"{len(self._leaving)} freed slots have not come back"
            )
