"""What decode is, in plain jax.numpy: all keys of the table at once, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mcjax.kernels.pages import KVPages
from mcjax.kernels.softmax import weights_of


def decode(
    queries: Float[Array, "B Q H D"],
    pages: KVPages,
    layer: int,
    page_table: Int[Array, "B N"],
    contexts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    firsts: Int[Array, " B"] | None = None,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
) -> tuple[Float[Array, "B Q H D"], Float[Array, "B Q H"]]:
    """Attention of a sequence's last tokens over its pages, and the logarithm of each softmax's sum (float32).

    Sequence b has `contexts[b]` tokens, the last `lengths[b]` of which are the first queries of its row (0: padding);
    their keys are in the pages already. Queries beyond `lengths[b]` give zeros and minus infinity, and so do those that
    see nothing here. `firsts[b]` (default 0) is the position of the first key of the table: a shard of a long context
    holds a part of it, and `merge` puts the shards' results together. The table may end before the context does.

    What a query sees, `window`, `soft_cap` and `scale`: as in `prefill.reference.prefill`. What none sees may be NaN.
    """
    if firsts is None:
        firsts = jnp.zeros_like(contexts)
    batch, width, heads, head_dim = queries.shape
    grouped = queries.reshape(batch, width, pages.kv_heads, -1, head_dim)

    def one(
        queries: Float[Array, "Q Hkv G D"],
        table: Int[Array, " N"],
        context: Int[Array, ""],
        length: Int[Array, ""],
        first: Int[Array, ""],
    ) -> tuple[Float[Array, "Q Hkv G D"], Float[Array, "Q Hkv G"]]:
        seen = pages.read(layer, table)  # [2, S, Hkv, D]
        place = first + jnp.arange(seen.shape[1])
        index = jnp.arange(width)
        position = jnp.where(index < length, context - length + index, -1)[:, None]
        visible = (place <= position) & (position >= 0)
        if window is not None:
            visible &= place > position - window
        weights, logs = weights_of(queries, seen[0], visible, soft_cap, scale)
        clean = jnp.where(visible.any(axis=0)[:, None, None], seen[1], 0)  # 0 * NaN is NaN
        return jnp.einsum("tkgs,skd->tkgd", weights, clean, precision=jax.lax.Precision.HIGHEST), logs

    mixed, logs = jax.vmap(one)(grouped, page_table, contexts, lengths, firsts)
    return mixed.reshape(queries.shape).astype(queries.dtype), logs.reshape(batch, width, heads)
