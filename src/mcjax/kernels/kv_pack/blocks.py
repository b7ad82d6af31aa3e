"""KV blocks as they travel and rest: tokens first, whatever the pages on a device look like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from mcjax.kernels.pages import LARGEST, stored


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVBlocks:
    """Canonical blocks. Quantised ones have a float32 scale for each vector of `D` numbers.

    Of one block, scales and numbers in this order are the bytes of `kvpool/encodings`.
    """

    data: Shaped[Array, "W L 2 page Hkv D"]
    scales: Float[Array, "W L 2 page Hkv"] | None = None


def encoded(blocks: KVBlocks, dtype: Any) -> KVBlocks:
    """The same numbers in another dtype; as they are, if it is theirs or None."""
    if dtype is None or jnp.dtype(dtype) == blocks.data.dtype:
        return blocks
    values = blocks.data
    if blocks.scales is not None:
        values = values.astype(jnp.float32) * blocks.scales[..., None]
    numbers, scales = stored(values, dtype)
    return KVBlocks(numbers, scales if jnp.dtype(dtype).name in LARGEST else None)
