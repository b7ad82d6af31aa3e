"""Host memory: one slab, allocated, aligned and touched once, so that no copy ever waits for a page fault."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import ConfigError
from mcjax.kvpool.stores.slots import SlotStore
from mcjax.types import Tier

ALIGNMENT_BYTES = 64
"""A cache line on x86 and Arm servers; also what XLA:CPU asks of a host buffer it reads without a copy."""

# All ones is a NaN in float32 and in bfloat16: whoever reads a freed slot shows it in every number that follows.
POISON_BYTE = 0xFF


class DramStore(SlotStore):
    """The DRAM tier of one node: `capacity` slots of `block_bytes` bytes.

    Each slot begins on an aligned address; where `block_bytes` is no multiple of the alignment, padding lies between
    slots. With `poison`, a slot is overwritten as soon as nobody owns it.
    """

    def __init__(self, node: str, capacity: int, block_bytes: int, name: str = "", poison: bool = False):
        """Allocates and touches the whole slab. Raises `ConfigError` when the machine refuses the memory."""
        if block_bytes < 1:
            raise ConfigError("block_bytes", block_bytes, "must be at least 1")
        stride = -(-block_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        try:
            raw = np.empty(capacity * stride + ALIGNMENT_BYTES, dtype=np.uint8)
        except MemoryError:
            problem = f"{capacity * stride} bytes of host memory are not to be had"
            raise ConfigError("pool_blocks", capacity, problem) from None
        super().__init__(node, Tier.DRAM, capacity, block_bytes, name)
        start = -raw.ctypes.data % ALIGNMENT_BYTES
        slab = raw[start : start + capacity * stride].reshape(capacity, stride)
        slab.fill(POISON_BYTE if poison else 0)  # touches every page
        self._blocks = slab[:, :block_bytes]
        self._poison = poison

    def buffer(self) -> NDArray[np.uint8]:
        """`[capacity, block_bytes]`, a view of the slab; rows are contiguous and aligned."""
        return self._blocks

    def _release(self, slots: list[int]) -> None:
        if self._poison:
            self._blocks[slots] = POISON_BYTE
        super()._release(slots)
