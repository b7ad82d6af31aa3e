"""KV pages as the Pallas kernels read and write them: heads first, so that one head's keys lie side by side.

`[page, D]` are the two last axes: what accelerators tile, and what a head's share of a page is. With few key heads a
device (tensor parallelism leaves one or two) any other order would pad each token's heads to a whole tile. What leaves
a device is the canonical block, tokens first: `kv_pack` goes from one to the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jaxtyping import Array, Float, Int, Shaped

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""The largest number of each dtype that pages may be quantised to, which a vector's largest is scaled to."""

SMALLEST_SCALE = {"int8": 2.0**-125, "float8_e4m3fn": 2.0**-116}
"""No scale is below it, so that no scaled or restored number is subnormal: XLA flushes those to zero."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPages:
    """Keys (0) and values (1) of all layers. Unquantised pages have no scales."""

    data: Shaped[Array, "P L 2 Hkv page D"]
    scales: Float[Array, "P L 2 Hkv page"] | None = None
    """Float32, one for each vector of `D` numbers: what the stored number is multiplied by."""

    @property
    def layers(self) -> int:
        return self.data.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.data.shape[3]

    @property
    def page_tokens(self) -> int:
        return self.data.shape[4]

    @property
    def head_dim(self) -> int:
        return self.data.shape[5]

    @classmethod
    def filled(
        cls, pages: int, layers: int, kv_heads: int, page_tokens: int, head_dim: int, dtype: Any, value: float = 0.0
    ) -> KVPages:
        """All `value`, which may be NaN; quantised pages hold it in their scales."""
        shape = (pages, layers, 2, kv_heads, page_tokens, head_dim)
        if jnp.dtype(dtype).name in LARGEST:
            return cls(jnp.ones(shape, dtype), jnp.full(shape[:-1], value, jnp.float32))
        return cls(jnp.full(shape, value, dtype))

    def formats(self, sharding: jax.sharding.Sharding) -> KVPages:
        """Where each array is to be and how it is to lie there, each page in one piece, as the kernels read it.

        For `jax.device_put`, and for `in_shardings` and `out_shardings` of every program that pages go through. Left to
        itself, XLA puts another axis innermost on a TPU where that saves padding (numbers with `D` below 128, scales
        with pages below 128), and then copies all pages to and fro around each kernel.
        """
        return jax.tree.map(lambda array: Format(Layout(tuple(range(array.ndim))), sharding), self)

    def read(self, layer: int, page_table: Int[Array, "*B N"]) -> Float[Array, "*B 2 S Hkv D"]:
        """Float32 keys and values of one layer, in the table's order; `S = N page`."""
        found = self.data[page_table, layer].astype(jnp.float32)  # [*B, N, 2, Hkv, page, D]
        if self.scales is not None:
            found = found * self.scales[page_table, layer][..., None]
        found = jnp.moveaxis(found, (-4, -2), (-5, -3))  # [*B, 2, N, page, Hkv, D]
        return found.reshape(*found.shape[:-4], -1, *found.shape[-2:])

    def write(
        self,
        layer: int,
        page: Int[Array, " T"],
        offset: Int[Array, " T"],
        entries: Float[Array, "T 2 Hkv D"],
    ) -> KVPages:
        """With each token's key and value at its page and offset; a token whose page is not below `P` is dropped."""
        numbers, scales = stored(entries, self.data.dtype)
        data = self.data.at[page, layer, :, :, offset].set(numbers, mode="drop")
        if self.scales is None:
            return KVPages(data)
        return KVPages(data, self.scales.at[page, layer, :, :, offset].set(scales, mode="drop"))


def stored(values: Float[Array, "*V D"], dtype: Any) -> tuple[Shaped[Array, "*V D"], Float[Array, "*V"]]:
    """Numbers of `dtype` and their scales, one a vector; scales of one where `dtype` is no quantised one.

    Each vector's largest number becomes the largest of `dtype`; to nearest, ties to even. The same bits as the blocks'
    encodings at rest (`mcjax/kvpool/encodings`). A vector that holds a NaN or an infinity comes back as nothing else.
    """
    name = jnp.dtype(dtype).name
    if name not in LARGEST:
        return values.astype(dtype), jnp.ones(values.shape[:-1], jnp.float32)
    wide = values.astype(jnp.float32)
    # XLA's largest number of a vector on a CPU may leave a NaN out: from 64 numbers on it does.
    most = jnp.where(jnp.isfinite(wide), jnp.abs(wide), jnp.inf).max(axis=-1)
    scales = jnp.maximum(most * np.float32(1 / LARGEST[name]), np.float32(SMALLEST_SCALE[name]))
    scaled = jnp.where(jnp.isfinite(scales)[..., None], wide * (1 / scales)[..., None], 0)
    scales = jnp.where(jnp.isfinite(scales), scales, jnp.nan)
    if name == "int8":
        scaled = jnp.clip(jnp.round(scaled), -127, 127)
    return scaled.astype(dtype), scales
