"""Paged attention in plain XLA: gather the pages, mask, softmax in float32. Slow, and the oracle of every other kernel.

Keys are laid out by position over the whole page table, whatever is valid, so each row's reductions have one fixed
order: inside one compiled shape a row's bits depend on its own positions, keys and values only.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from mcjax.kernels.attention.pages import read, sizes
from mcjax.kernels.choice import Layout

# Finite, so that a row that may see nothing (padding) gives zeros and not NaN; far below any real score.
MASKED_SCORE = -1e30


def paged_attention(
    queries: Float[Array, "B T H D"],
    pages: Shaped[Array, "P L C ..."],
    layer: int,
    page_table: Int[Array, "B N"],
    positions: Int[Array, "B T"],
    layout: Layout = "tokens_first",
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
) -> Float[Array, "B T H D"]:
    """Each query attends to every key at or before its own position.

    The key at position p of row b lies in page `page_table[b, p // page]`, at offset `p % page`. A query whose position
    is negative is padding: it attends to nothing and gives zeros. What lies behind masked positions is never looked at,
    so it may be NaN. `H` is a multiple of `Hkv` (grouped queries share a key head). The options are those of
    `base.Attention`. Returns the dtype of `queries`.
    """
    batch, steps, heads, head_dim = queries.shape
    page_tokens, kv_heads = sizes(pages, layout)
    span = page_table.shape[1] * page_tokens

    keys, values = read(pages, layer, page_table, layout)  # [B, S, Hkv, D]
    key_positions = jnp.arange(span, dtype=positions.dtype)
    visible = key_positions[None, None, :] <= positions[:, :, None]  # [B, T, S]
    if window is not None:
        visible &= key_positions[None, None, :] > positions[:, :, None] - window
    # A weight of zero does not silence a NaN value (0 * NaN is NaN): the value itself must go.
    values = jnp.where(visible.any(axis=1)[:, :, None, None], values, 0)

    grouped = queries.reshape(batch, steps, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum(
        "btkgd,bskd->bkgts",
        grouped,
        keys,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    mask = visible[:, None, None]  # [B, 1, 1, T, S]
    scores = scores * (head_dim**-0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = jnp.tanh(scores / soft_cap) * soft_cap
    scores = jnp.where(mask, scores, MASKED_SCORE)
    weights = jnp.where(mask, jnp.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
    mixed = jnp.einsum(
        "bkgts,bskd->btkgd",
        weights,
        values.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    total = jnp.moveaxis(weights.sum(axis=-1), 3, 1)[..., None]  # [B, T, Hkv, G, 1]
    # At least one weight is exp(0) = 1 unless the row is padding: the floor only ever divides zeros.
    return (mixed / jnp.maximum(total, 1)).astype(queries.dtype).reshape(queries.shape)
