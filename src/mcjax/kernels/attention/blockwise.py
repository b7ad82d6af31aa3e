"""Paged attention in plain XLA, a block of keys at a time: time and memory follow the context in use.

Blocks are the same for every row and call, and a block that a row cannot see leaves its state untouched, bit for bit.
So the loop may stop at the longest context of the batch, and each row's bits still depend on its own keys and values
only.
Source of the running softmax: Milakov and Gimelshein 2018 (arXiv:1805.02867).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from mcjax.kernels.attention.pages import read
from mcjax.kernels.attention.reference import MASKED_SCORE

# Keys in a block, at least. Measured on two shared x86 cores with the built-in model: 64 is as fast as 128 or 256 on
# long contexts and twice as fast on short ones.
BLOCK_TOKENS = 64


def paged_attention(
    queries: Float[Array, "B T H D"],
    pages: Shaped[Array, "P L 2 page Hkv D"],
    layer: int,
    page_table: Int[Array, "B N"],
    positions: Int[Array, "B T"],
) -> Float[Array, "B T H D"]:
    """Same contract as `reference.paged_attention`; differs from it in the last bits only."""
    batch, steps, heads, head_dim = queries.shape
    page_tokens, kv_heads = pages.shape[3], pages.shape[4]
    groups = heads // kv_heads
    block_pages = -(-BLOCK_TOKENS // page_tokens)
    block_tokens = block_pages * page_tokens
    # Entries added here are never seen: their positions lie beyond the context that the table holds.
    page_table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % block_pages)))
    last = positions.max(axis=1)  # [B]
    grouped = jnp.moveaxis(queries.reshape(batch, steps, kv_heads, groups, head_dim), 1, 3)
    grouped = grouped.reshape(batch, kv_heads, groups * steps, head_dim)
    row_positions = jnp.tile(positions, (1, groups))[:, None]  # [B, 1, G T]

    def block(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, total, mixed = state  # [B, Hkv, G T], same, [B, Hkv, G T, D]
        table = jax.lax.dynamic_slice_in_dim(page_table, index * block_pages, block_pages, axis=1)
        gathered = read(pages, layer, table)  # [B, block_pages, 2, page, Hkv, D]
        keys = gathered[:, :, 0].reshape(batch, block_tokens, kv_heads, head_dim)
        values = gathered[:, :, 1].reshape(batch, block_tokens, kv_heads, head_dim).astype(jnp.float32)
        key_positions = index * block_tokens + jnp.arange(block_tokens, dtype=positions.dtype)
        written = key_positions[None, :] <= last[:, None]  # [B, S]
        # A weight of zero does not silence a NaN value (0 * NaN is NaN): the value itself must go.
        values = jnp.where(written[:, :, None, None], values, 0)
        visible = key_positions <= row_positions[..., None]  # [B, 1, G T, S]
        scores = jnp.einsum(
            "bkqd,bskd->bkqs",
            grouped,
            keys,
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        scores = jnp.where(visible, scores * head_dim**-0.5, MASKED_SCORE)
        higher = jnp.maximum(peak, scores.max(axis=-1))
        weights = jnp.where(visible, jnp.exp(scores - higher[..., None]), 0)
        shrink = jnp.exp(peak - higher)
        added = jnp.einsum(
            "bkqs,bskd->bkqd",
            weights,
            values,
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        sees = row_positions >= index * block_tokens  # [B, 1, G T]
        return (
            jnp.where(sees, higher, peak),
            jnp.where(sees, total * shrink + weights.sum(axis=-1), total),
            jnp.where(sees[..., None], mixed * shrink[..., None] + added, mixed),
        )

    rows = (batch, kv_heads, groups * steps)
    start = (
        jnp.full(rows, MASKED_SCORE, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((*rows, head_dim), jnp.float32),
    )
    blocks = last.max() // block_tokens + 1  # a batch of padding has last = -1: no block at all
    _, total, mixed = jax.lax.fori_loop(0, blocks, block, start)
    # The largest score of a valid row has weight exp(0) = 1, so its total is at least 1; only padding has none.
    mixed = mixed / jnp.where(total > 0, total, 1)[..., None]
    mixed = mixed.reshape(batch, kv_heads, groups, steps, head_dim)
    return jnp.moveaxis(mixed, 3, 1).reshape(queries.shape).astype(queries.dtype)
