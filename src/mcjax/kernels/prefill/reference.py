"""What prefill is, in plain jax.numpy. Slow: every token meets the whole table of every sequence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mcjax.kernels.pages import KVPages
from mcjax.kernels.softmax import weights_of


def prefill(
    queries: Float[Array, "T H D"],
    keys: Float[Array, "T Hkv D"],
    values: Float[Array, "T Hkv D"],
    pages: KVPages,
    layer: int,
    page_table: Int[Array, "B N"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    prefixes: Int[Array, " B"],
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
) -> tuple[Float[Array, "T H D"], KVPages]:
    """Attention of new tokens over their sequence's cached prefix and each other; and the pages with them in.

    Sequence b has `prefixes[b]` tokens in its pages, and `lengths[b]` new ones in the rows from `starts[b]` on, which
    take the positions after the prefix. Sequences do not overlap, neither in rows nor in the pages that they write.
    Rows of no sequence give zeros. The token at position p lies in page `page_table[b, p // page]` at offset
    `p % page`; table entries beyond the last position may name any page.

    A query sees the keys at or before its position, and only the last `window` of those. Scores are scaled by `scale`
    (default `D**-0.5`), then capped: `soft_cap * tanh(score / soft_cap)`. Every key and value is taken as the pages
    store it, a new one too, so quantised pages give the same result however a prompt is split. What no query may see
    may be NaN. Pages and offsets that are not written keep their bits.
    """
    tokens, heads, head_dim = queries.shape
    row = jnp.arange(tokens)
    owned = (row >= starts[:, None]) & (row < (starts + lengths)[:, None])  # [B, T]
    owner = jnp.argmax(owned, axis=0)
    position = jnp.where(owned.any(axis=0), prefixes[owner] + row - starts[owner], -1)
    page = page_table[owner, jnp.maximum(position, 0) // pages.page_tokens]
    page = jnp.where(position < 0, pages.data.shape[0], page)
    pages = pages.write(layer, page, position % pages.page_tokens, jnp.stack([keys, values], axis=1))
    grouped = queries.reshape(tokens, pages.kv_heads, -1, head_dim).astype(jnp.float32)

    def one(mixed: Float[Array, "T Hkv G D"], sequence: Int[Array, ""]) -> tuple[Float[Array, "T Hkv G D"], None]:
        seen = pages.read(layer, page_table[sequence])  # [2, S, Hkv, D]
        place = jnp.arange(seen.shape[1])
        visible = (place <= position[:, None]) & owned[sequence][:, None]  # [T, S]
        if window is not None:
            visible &= place > position[:, None] - window
        weights, _ = weights_of(grouped, seen[0], visible, soft_cap, scale)
        clean = jnp.where(visible.any(axis=0)[:, None, None], seen[1], 0)  # 0 * NaN is NaN
        return mixed + jnp.einsum("tkgs,skd->tkgd", weights, clean, precision=jax.lax.Precision.HIGHEST), None

    mixed, _ = jax.lax.scan(one, jnp.zeros(grouped.shape, jnp.float32), jnp.arange(page_table.shape[0]))
    return mixed.reshape(tokens, heads, head_dim).astype(queries.dtype), pages
