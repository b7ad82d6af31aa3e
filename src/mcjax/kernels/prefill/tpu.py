"""Ragged chunked prefill on a TPU: new keys and values go to their pages, then every query reads keys from pages only.

Two Pallas kernels in one call. `tpu_write` writes; `tpu_attention` goes over blocks of queries, and for each over the
blocks of keys that it can see. A running softmax as in flash attention (Dao et al. 2022), the pages by hand-made copies
through a page table as in paged attention (Kwon et al. 2023).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mcjax.kernels.pages import KVPages
from mcjax.kernels.prefill.tpu_attention import attend
from mcjax.kernels.prefill.tpu_plan import plan_of
from mcjax.kernels.prefill.tpu_schedule import query_blocks
from mcjax.kernels.prefill.tpu_write import write
from mcjax.kernels.target import Target


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
    target: Target,
    query_tokens: int | None = None,
    key_tokens: int | None = None,
    tile_tokens: int | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "T H D"], KVPages]:
    """As `reference.prefill`: sums are in float32; products of bfloat16 numbers, where neither queries nor pages are
    wider, and the softmax's weights are rounded to that before they meet the values.

    Stronger than the reference: with a `window`, keys and values before all that any query of a sequence sees may be
    NaN too. Pages are overwritten in place if the caller's `jit` is given them (`donate_argnums`) and they lie as
    `KVPages.formats` says.

    Blocks (default: `tuning_tpu.json`): `query_tokens` queries and `key_tokens` keys at a time, of which `tile_tokens`
    queries, with all heads of a group, meet the keys in one product. Powers of two; a page or more of keys.
    `interpret`: a `pltpu.InterpretParams` in place of plain interpretation.

    Raises `KernelRefused` for shapes that have no body, or do not fit the memories of `target.kind`.
    """
    plan = plan_of(
        queries,
        pages,
        page_table,
        window=window,
        soft_cap=soft_cap,
        scale=scale,
        target=target,
        query_tokens=query_tokens,
        key_tokens=key_tokens,
        tile_tokens=tile_tokens,
    )
    interpret = target.interpret if interpret is None else interpret
    tokens = queries.shape[0]
    page_table, starts, lengths, prefixes = (jnp.asarray(x, jnp.int32) for x in (page_table, starts, lengths, prefixes))
    batch = (page_table, starts, lengths, prefixes)
    pages = write(keys, values, pages, layer, *batch, target=target, interpret=interpret)

    rows = jnp.pad(queries, ((0, max(0, plan.query_tokens - tokens)), (0, 0), (0, 0)))
    blocks = query_blocks(starts, lengths, prefixes, rows.shape[0], plan.query_tokens)
    mixed = attend(plan, rows, pages, layer, page_table, blocks, interpret=interpret)
    return mixed[:tokens], pages
