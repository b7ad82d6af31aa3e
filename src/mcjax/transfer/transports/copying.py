"""Copies of bytes inside one process, piece by piece, each piece summed while it is in the cache."""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

PIECE_BYTES = 256 << 10
"""Copied and summed in one go: it fits a core's second-level cache twice, and is long enough for the call to cost
nothing."""


def digest_of(block: NDArray[np.uint8]) -> bytes:
    """XXH3-128 of contiguous bytes, 16 bytes."""
    return xxhash.xxh3_128_digest(block)  # pyright: ignore[reportArgumentType]


def copy_and_sum(read: NDArray[np.uint8], written: NDArray[np.uint8]) -> bytes:
    """Copy a block, and sum what arrived: XXH3-128, 16 bytes.

    Of the bytes that arrived: the source may change hands meanwhile, and then they differ from what is there now.
    """
    digest = xxhash.xxh3_128()
    for start in range(0, len(read), PIECE_BYTES):
        piece = written[start : start + PIECE_BYTES]
        piece[:] = read[start : start + PIECE_BYTES]
        digest.update(piece)  # pyright: ignore[reportArgumentType]
    return digest.digest()
