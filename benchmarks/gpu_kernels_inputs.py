"""Inputs of a case, made on the device without temporaries: pages in disorder, NaN wherever no kernel may look."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mcjax.cost.kernel_cases import DTYPES, KernelCase
from mcjax.kernels.kv_pack.blocks import KVBlocks
from mcjax.kernels.pages import LARGEST, KVPages

SPARE_PAGES = 1
MOST_LAYERS = 32


@dataclass(frozen=True)
class AttentionInputs:
    """As the kernels take them; `layers` of the pages are filled, to go round through."""

    pages: KVPages
    page_table: Int[Array, "B N"]
    before: Int[Array, " B"]
    """Of `prefill` the prefixes, of `decode` the contexts."""
    lengths: Int[Array, " B"]
    starts: Int[Array, " B"]
    queries: Array
    """Of `prefill` `[T, H, D]`, of `decode` `[B, Q, H, D]`."""
    keys: Float[Array, "T Hkv D"] | None
    values: Float[Array, "T Hkv D"] | None


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "salt"))
def noise(shape: tuple[int, ...], dtype: str, salt: int) -> Array:
    """Numbers of mean zero and variance one (as `dtype` scales them), each a hash of its index."""
    return _noise(shape, salt).astype(dtype)


def _noise(shape: tuple[int, ...], salt: int) -> Array:
    index = jnp.full(shape, salt, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        index += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride % 2**32)
        stride *= shape[axis]
    index *= np.uint32(2654435761)
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        index = (index ^ (index >> shift)) * np.uint32(factor)
    unit = (index >> 8).astype(jnp.float32) * 2.0**-24
    return (2 * unit - 1) * 3**0.5


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _pages(shape: tuple[int, ...], dtype: str, written: Int[Array, " P"]) -> KVPages:
    """Page p holds `written[p]` tokens; what comes after them is NaN."""
    seen = (jnp.arange(shape[4]) < written[:, None])[:, None, None, None]  # [P, 1, 1, 1, page]
    numbers = _noise(shape, 1)
    if dtype not in LARGEST:
        return KVPages(jnp.where(seen[..., None], numbers, jnp.nan).astype(dtype))
    step = 3**0.5 / LARGEST[dtype]
    scales = jnp.where(seen, step * (1 + _noise(shape[:-1], 2) / 4), jnp.nan)
    return KVPages((numbers / step).astype(dtype), scales.astype(jnp.float32))


def attention_inputs(case: KernelCase, rotate_bytes: int) -> AttentionInputs:
    """Of `prefill` and `decode`; as many layers as it takes to go round through `rotate_bytes`."""
    sequences = [(before, new) for count, before, new in case.sequences for _ in range(count)]
    before = np.array([one for one, _ in sequences], np.int32)
    lengths = np.array([new for _, new in sequences], np.int32)
    total = before + lengths if case.kernel == "prefill" else before
    page, batch = case.page_tokens, len(sequences)
    width = int(-(-total.max() // page))
    table = np.random.default_rng(0).permutation(batch * width + SPARE_PAGES)[: batch * width].reshape(batch, width)
    written = np.zeros(batch * width + SPARE_PAGES, np.int32)
    written[table] = np.clip(before[:, None] - np.arange(width) * page, 0, page)
    layer_bytes = int(total.sum()) * case.shape.token_bytes
    layers = min(max(-(-rotate_bytes // layer_bytes), 2 if layer_bytes < rotate_bytes else 1), MOST_LAYERS)
    shape = (len(written), layers, 2, case.kv_heads, page, case.head_dim)
    starts = np.cumsum(lengths) - lengths
    tokens, most = int(lengths.sum()), int(lengths.max())
    table, before, lengths, starts = (jnp.asarray(one, jnp.int32) for one in (table, before, lengths, starts))
    pages = _pages(shape, case.kv_dtype, jnp.asarray(written))
    if case.kernel == "decode":
        queries = noise((batch, most, case.heads, case.head_dim), case.dtype, 3)
        return AttentionInputs(pages, table, before, lengths, starts, queries, None, None)
    queries, keys, values = (
        noise((tokens, heads, case.head_dim), case.dtype, salt)
        for salt, heads in ((3, case.heads), (4, case.kv_heads), (5, case.kv_heads))
    )
    return AttentionInputs(pages, table, before, lengths, starts, queries, keys, values)


def packing_inputs(case: KernelCase, turns: int, heads: int | None = None) -> tuple[KVPages, Int[Array, "R W"], Any]:
    """Pages, `turns` disjoint sets of slots of them, and the blocks that `kv_unpack` takes (of `heads` heads)."""
    count = turns * case.pages + SPARE_PAGES
    slots = np.random.default_rng(0).permutation(count)[: turns * case.pages].reshape(turns, case.pages)
    written = np.zeros(count, np.int32)
    written[slots] = case.page_tokens
    shape = (count, case.layers, 2, case.kv_heads, case.page_tokens, case.head_dim)
    pages = _pages(shape, case.kv_dtype, jnp.asarray(written))
    if case.kernel == "kv_pack":
        return pages, jnp.asarray(slots, jnp.int32), None
    dtype = case.block_dtype or case.kv_dtype
    block = (case.pages, case.layers, 2, case.page_tokens, heads or case.kv_heads, case.head_dim)
    scales = noise(block[:-1], "float32", 7) / 4 + 1 if DTYPES[dtype][1] else None
    return pages, jnp.asarray(slots, jnp.int32), KVBlocks(noise(block, dtype, 6), scales)


def device_bytes(case: KernelCase, rotate_bytes: int) -> int:
    """About what a case's inputs and results take."""
    cost = case.cost()
    return max(cost.read_bytes, rotate_bytes) + 2 * cost.bytes
