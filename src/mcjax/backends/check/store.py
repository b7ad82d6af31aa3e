"""A store of small byte arrays. What nobody owns any more is overwritten at once, so that reading it shows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mcjax.kvpool.stores.slots import SlotStore
from mcjax.types import Tier

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
