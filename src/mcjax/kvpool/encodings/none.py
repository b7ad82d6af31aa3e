"""`none`: blocks rest as they were computed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class AsComputed:
    """Changes nothing; packing and unpacking copy nothing."""

    name = "none"
    lossy = False

    def __init__(self, block_bytes: int):
        self.block_bytes = block_bytes
        self.packed_bytes = block_bytes

    def pack(self, block: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return block

    def unpack(self, packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return packed
