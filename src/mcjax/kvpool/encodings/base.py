"""What an encoding must know of a block, and what the quantising ones share.

A packed block is the scales of its head vectors, then their quantised numbers: `scales: [V] float32`, `numbers: [V, W]`
of one byte each, where `V` counts the vectors (layer, key or value, token, head) and `W` is the head's width. One scale
a vector keeps an outlier channel of one head from costing the precision of the others (KIVI, arXiv:2402.02750, section
3, quantises values by token too; by-channel keys would need whole groups of tokens at once, and so a scale that changes
as a block fills).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import ConfigError, Unencodable

KVDtype = Literal["float32", "bfloat16"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The numbers in a block: `rows` vectors of `width` numbers for each of `tokens` tokens.

    Rows are a model's layers, keys and values, and KV heads. In which order the vectors lie is of no matter here; the
    numbers of one lie side by side.
    """

    dtype: KVDtype
    tokens: int
    rows: int
    width: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError("dtype", self.dtype, "is no dtype of KV blocks", DTYPE_BYTES)
        for name in ("tokens", "rows", "width"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be at least 1")

    @property
    def vectors(self) -> int:
        return self.tokens * self.rows

    @property
    def block_bytes(self) -> int:
        """Of a block as it was computed."""
        return self.vectors * self.width * DTYPE_BYTES[self.dtype]

    @property
    def quantised_bytes(self) -> int:
        """Of a block with one byte a number and one scale a vector."""
        return self.vectors * (SCALE_BYTES + self.width)


class Quantised(ABC):
    """An encoding of one byte a number, in NumPy: what the compiled ones are tested against.

    Every vector's largest number is scaled to `largest`, the largest that a byte holds. A vector of nothing but NaN is
    one that nobody has written yet (pages begin as NaN): it comes back as it was. NaN or infinity beside numbers is
    refused.
    """

    name: str
    lossy = True
    largest: float
    smallest_scale: float
    """No scale is below it, so that no scaled or restored number is subnormal: XLA flushes those to zero."""
    number: np.dtype[Any]
    """Of a quantised number, one byte."""

    def __init__(self, layout: BlockLayout):
        self.layout = layout
        self.block_bytes = layout.block_bytes
        self.packed_bytes = layout.quantised_bytes

    @abstractmethod
    def quantise(self, scaled: NDArray[np.float32]) -> NDArray[Any]:
        """To the nearest number of the encoding; ties to even."""

    def pack(self, block: NDArray[np.uint8]) -> NDArray[np.uint8]:
        values = to_float32(block, self.layout)
        with np.errstate(invalid="ignore"):
            most = np.abs(values).max(axis=1)
            unwritten = np.isnan(values).all(axis=1)
            refuse(self.name, np.flatnonzero(~np.isfinite(most) & ~unwritten))
            # Multiplied, not divided: compilers turn a division by a constant into this, and the bits shall be equal.
            scales = np.maximum(most * np.float32(1 / self.largest), np.float32(self.smallest_scale))
            scaled = values * (np.float32(1) / scales)[:, None]
            scaled[unwritten] = 0
        numbers = self.quantise(scaled).view(np.uint8)
        return np.concatenate([scales.astype(np.float32).view(np.uint8), numbers.reshape(-1)])

    def unpack(self, packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
        scales, numbers = self.parts(packed)
        values = numbers.astype(np.float32) * scales[:, None]
        limit = np.finfo(np.float32).max  # a product may round past it
        return from_float32(np.clip(values, -limit, limit), self.layout)

    def parts(self, packed: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[Any]]:
        """`scales: [V]` and `numbers: [V, W]` of a packed block, as views."""
        at = self.layout.vectors * SCALE_BYTES
        numbers = packed[at:].view(self.number).reshape(self.layout.vectors, self.layout.width)
        return packed[:at].view(np.float32), numbers


def refuse(encoding: str, vectors: NDArray[np.intp]) -> None:
    """Raise `Unencodable` if there are any such vectors."""
    if len(vectors):
        problem = f"{encoding} has no NaN and no infinity, and {len(vectors)} vectors hold some (first: {vectors[0]})"
        raise Unencodable(problem)


def to_float32(block: NDArray[np.uint8], layout: BlockLayout) -> NDArray[np.float32]:
    """`[V, W]`: a block's numbers."""
    shape = (layout.vectors, layout.width)
    if layout.dtype == "float32":
        return block.view(np.float32).reshape(shape)
    return (block.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)


def from_float32(values: NDArray[np.float32], layout: BlockLayout) -> NDArray[np.uint8]:
    """`[block_bytes]`: a block of these numbers, each rounded to the nearest of its dtype; ties to even."""
    if layout.dtype == "float32":
        return values.reshape(-1).view(np.uint8)
    words = values.reshape(-1).view(np.uint32)
    rounded = (words + (0x7FFF + ((words >> 16) & 1))) >> 16
    rounded = np.where(np.isnan(values.reshape(-1)), 0x7FC0, rounded)
    return rounded.astype(np.uint16).view(np.uint8)
