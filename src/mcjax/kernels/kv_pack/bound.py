"""What a call costs, for the bodies to tell the compiler."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from mcjax.cost.kernels import AttentionShape, KernelCost, kv_pack_cost
from mcjax.kernels.pages import LARGEST, KVPages


def pack_cost(pages: KVPages, slots: int, heads: int, block_dtype: Any, *, packing: bool) -> KernelCost:
    """Of packing `heads` heads of so many slots into blocks of that dtype, or of unpacking them."""

    def sizes(dtype: Any) -> tuple[int, int]:
        return jnp.dtype(dtype).itemsize, 4 if jnp.dtype(dtype).name in LARGEST else 0

    (page_number, page_scale), (block_number, block_scale) = sizes(pages.data.dtype), sizes(block_dtype)
    shape = AttentionShape(
        heads=heads,
        kv_heads=heads,
        head_dim=pages.head_dim,
        page_tokens=pages.page_tokens,
        kv_dtype_bytes=page_number,
        scale_bytes=page_scale,
    )
    token_bytes = 2 * heads * (pages.head_dim * block_number + block_scale)
    cost = kv_pack_cost(shape, pages.layers, slots, token_bytes)
    return cost if packing else KernelCost(cost.flops, cost.written_bytes, cost.read_bytes)
