"""Packing and unpacking by Pallas kernels: which body, and what none of them does."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from mcjax.errors import KernelRefused
from mcjax.kernels.kv_pack import gpu, reference, tpu
from mcjax.kernels.kv_pack.blocks import KVBlocks
from mcjax.kernels.pages import LARGEST, KVPages
from mcjax.kernels.target import Target

CONVERTED = ("float32", "bfloat16", *LARGEST)
"""Dtypes that bodies convert to and from; others are moved as they are."""


def kv_pack(
    pages: KVPages,
    slots: Int[Array, " W"],
    *,
    first_head: int = 0,
    heads: int | None = None,
    dtype: Any = None,
    target: Target,
    layout: tpu.Layout = "default",
) -> KVBlocks:
    """The pages named by `slots` as canonical blocks `[W, L, 2, page, heads, D]`, to the bits of `reference.kv_pack`.

    `layout` is for TPUs: "free" if what takes the blocks leaves it to XLA how they lie in memory (it is in the same
    compiled program, or its `out_shardings` say `Layout.AUTO`). Unquantised blocks then are moved by DMA alone.

    Raises `KernelRefused`, which names the way out: a range of heads that the pages do not have, dtypes that no body
    converts, pages that do not fit VMEM, or that Triton addresses wrongly.
    """
    heads = pages.kv_heads - first_head if heads is None else heads
    _check("kv_pack", pages, first_head, heads, pages.data.dtype if dtype is None else dtype)
    if slots.shape[0] == 0:
        return reference.kv_pack(pages, slots, first_head=first_head, heads=heads, dtype=dtype)
    if target.platform == "gpu":
        return gpu.kv_pack(pages, slots, first_head=first_head, heads=heads, dtype=dtype, target=target)
    return tpu.kv_pack(pages, slots, first_head=first_head, heads=heads, dtype=dtype, target=target, layout=layout)


def kv_unpack(
    pages: KVPages,
    slots: Int[Array, " W"],
    blocks: KVBlocks,
    *,
    first_head: int = 0,
    target: Target,
    layout: tpu.Layout = "default",
) -> KVPages:
    """The pages with the blocks in, to the bits of `reference.kv_unpack`; in their own memory where they are donated.

    `slots` are all different. `layout` as in `kv_pack`: "free" if XLA may choose how the blocks lie in memory.
    Raises `KernelRefused` as `kv_pack` does.
    """
    _check("kv_unpack", pages, first_head, blocks.data.shape[4], blocks.data.dtype)
    if slots.shape[0] == 0:
        return pages
    if target.platform == "gpu":
        return gpu.kv_unpack(pages, slots, blocks, first_head=first_head, target=target)
    return tpu.kv_unpack(pages, slots, blocks, first_head=first_head, target=target, layout=layout)


def _check(kernel: str, pages: KVPages, first_head: int, heads: int, block_dtype: Any) -> None:
    if not (0 <= first_head < first_head + heads <= pages.kv_heads):
        raise KernelRefused(
            kernel,
            f"heads {first_head} to {first_head + heads} are not among the {pages.kv_heads} of these pages",
            "choose a range of one head or more that they have",
        )
    names = jnp.dtype(pages.data.dtype).name, jnp.dtype(block_dtype).name
    if names[0] != names[1] and not set(names) <= set(CONVERTED):
        raise KernelRefused(
            kernel,
            f"pages of {names[0]} and blocks of {names[1]}",
            f"use one dtype for both, or {', '.join(CONVERTED)}",
        )
