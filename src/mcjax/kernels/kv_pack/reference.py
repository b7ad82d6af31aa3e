"""What packing and unpacking are, in plain jax.numpy."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from mcjax.kernels.kv_pack.blocks import KVBlocks, encoded
from mcjax.kernels.pages import KVPages


def kv_pack(
    pages: KVPages, slots: Int[Array, " W"], *, first_head: int = 0, heads: int | None = None, dtype: Any = None
) -> KVBlocks:
    """The pages named by `slots` as canonical blocks of `heads` key heads from `first_head` on (default: all of them).

    `dtype` is that of the blocks (default: that of the pages). Quantised blocks get one scale a vector of `D` numbers;
    from pages that are quantised to the same dtype, numbers and scales are handed on as they are. Where a receiver
    holds other heads than the sender, each sends the range that both have.
    """
    until = pages.kv_heads if heads is None else first_head + heads
    data = jnp.moveaxis(pages.data[slots, :, :, first_head:until], 3, 4)  # [W, L, 2, page, Hkv, D]
    scales = None
    if pages.scales is not None:
        scales = jnp.moveaxis(pages.scales[slots, :, :, first_head:until], 3, 4)
    return encoded(KVBlocks(data, scales), dtype)


def kv_unpack(pages: KVPages, slots: Int[Array, " W"], blocks: KVBlocks, *, first_head: int = 0) -> KVPages:
    """The pages with the blocks in: heads from `first_head` on of the pages that `slots` name, all of them different.

    Blocks of another dtype than the pages become theirs, as in `kv_pack`. Everything else keeps its bits.
    """
    until = first_head + blocks.data.shape[4]
    blocks = encoded(blocks, pages.data.dtype)
    data = pages.data.at[slots, :, :, first_head:until].set(jnp.moveaxis(blocks.data, 3, 4))
    if pages.scales is None:
        return KVPages(data)
    assert blocks.scales is not None
    return KVPages(data, pages.scales.at[slots, :, :, first_head:until].set(jnp.moveaxis(blocks.scales, 3, 4)))
