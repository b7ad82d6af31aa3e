"""Host memory: slots of one slab, so that no copy ever waits for a page fault and others can map what is in there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import ConfigError
from mcjax.kvpool.stores.slab import HugePages, Slab, area_bytes
from mcjax.kvpool.stores.slots import SlotStore
from mcjax.types import Packer, Tier

# All ones is a NaN in float32 and in bfloat16: whoever reads a freed slot shows it in every number that follows.
POISON_BYTE = 0xFF


class HostStore(SlotStore):
    """The DRAM tier of one node: `capacity` slots of `block_bytes` bytes, one size class of a slab.

    Slots begin on a page where a block is at least a page long, else on a cache line (`slab.stride_bytes`); padding
    lies between slots where `block_bytes` is no multiple of that. With `poison`, a slot is overwritten as soon as
    nobody owns it.
    """

    def __init__(
        self,
        node: str,
        capacity: int,
        block_bytes: int,
        name: str = "",
        poison: bool = False,
        packer: Packer | None = None,
        slab: Slab | None = None,
        huge_pages: HugePages = "auto",
        numa_node: int | None = None,
    ):
        """Takes its slots of `slab`, or makes one of its own (with `huge_pages` and `numa_node`), every page of it
        there. Raises `ConfigError` when the machine refuses the memory, `ValueError` when the slab has not so much."""
        if block_bytes < 1:
            raise ConfigError("block_bytes", block_bytes, "must be at least 1")
        super().__init__(node, Tier.DRAM, capacity, block_bytes, name, packer)
        self.slab = slab or Slab(area_bytes(capacity, block_bytes), huge_pages, numa_node)
        self.area = self.slab.carve(capacity, block_bytes)
        """Where in the slab the slots lie."""
        self._owns_slab = slab is None
        self._blocks = self.slab.blocks(self.area)
        self._poison = poison
        if poison:
            self._blocks.fill(POISON_BYTE)

    def buffer(self) -> NDArray[np.uint8]:
        """`[capacity, block_bytes]`, a view of the slab; rows are contiguous and aligned."""
        return self._blocks

    def close(self) -> None:
        """Let go of the memory, and give it back if the slab is the store's own. Nothing may be asked afterwards."""
        self._blocks = np.zeros((0, self.block_bytes), np.uint8)
        if self._owns_slab:
            self.slab.close()

    def _release(self, slots: list[int]) -> None:
        if self._poison and len(self._blocks):  # closed at the end of a run, with slots that nobody will ever take
            self._blocks[slots] = POISON_BYTE
        super()._release(slots)
