"""Stores of small byte arrays. What nobody owns any more is overwritten at once, so that reading it shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mcjax.kvpool.base import Stored
from mcjax.kvpool.stores.slots import SlotStore
from mcjax.types import BlockId, Tier

POISON = 0xFF


class ByteStore(SlotStore):
    """Slots with bytes, in any tier."""

    def __init__(self, node: str, tier: Tier, capacity: int, block_bytes: int, name: str = ""):
        super().__init__(node, tier, capacity, block_bytes, name)
        self._buffer = np.full((capacity, block_bytes), POISON, np.uint8)

    def buffer(self) -> NDArray[np.uint8]:
        return self._buffer

    def _release(self, slots: list[int]) -> None:
        self._buffer[slots] = POISON
        super()._release(slots)

    def wipe(self) -> None:
        super().wipe()
        self._buffer[:] = POISON


@dataclass(frozen=True, slots=True)
class Left:
    """What a node that died leaves on its SSD: its committed blocks, parents first, and their bytes."""

    stored: Sequence[Stored]
    payloads: NDArray[np.uint8]
    """`[blocks, block_bytes]`"""


class DiskStore(ByteStore):
    """An SSD of bytes, which outlives its node: `left` is what the store of a dead one has for the next."""

    def __init__(self, node: str, capacity: int, block_bytes: int, found: Left | None = None):
        super().__init__(node, Tier.SSD, capacity, block_bytes)
        self.left: Left | None = None
        self._parents: dict[int, BlockId | None] = {}
        self._found: list[Stored] = []
        for number, one in enumerate([] if found is None else found.stored[:capacity]):
            (slot,) = self.reserve(1)
            assert found is not None
            self._buffer[slot] = found.payloads[number]
            self._found.append(Stored(slot, one.block, one.parent, one.checksum))
            self.commit((slot,), (one.block,), (one.checksum,), one.parent)

    def commit(
        self,
        slots: Sequence[int],
        blocks: Sequence[BlockId],
        checksums: Sequence[bytes],
        parent: BlockId | None = None,
    ) -> None:
        super().commit(slots, blocks, checksums, parent)
        self._parents.update(zip(slots, (parent, *blocks[:-1]), strict=True))

    def recovered(self) -> Sequence[Stored]:
        found, self._found = self._found, []
        return found

    def resting(self) -> list[int]:
        """The slots of committed blocks, in the order in which they came."""
        return list(self._headers)

    def wipe(self) -> None:
        stored = [
            Stored(slot, block, self._parents[slot], checksum) for slot, (block, checksum) in self._headers.items()
        ]
        self.left = Left(stored, self._buffer[self.resting()])
        super().wipe()
