"""New keys and values into their pages on a TPU, in place: what prefill begins with, and what a decode step needs too.

XLA's own scatter wants the written axes outermost in memory: it copies all pages into that order and back, each layer.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mcjax.kernels.pages import KVPages, stored
from mcjax.kernels.prefill.tpu_pages import RING, write_pieces
from mcjax.kernels.prefill.tpu_schedule import page_pieces
from mcjax.kernels.target import Target
from mcjax.kernels.vmem import require_vmem, tiled_bytes

PIECE_TOKENS = 32
"""Of a piece of a page: a tile of the narrowest numbers."""


def write(
    keys: Float[Array, "T Hkv D"],
    values: Float[Array, "T Hkv D"],
    pages: KVPages,
    layer: int,
    page_table: Int[Array, "B N"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    prefixes: Int[Array, " B"],
    *,
    target: Target,
    interpret: Any = None,
) -> KVPages:
    """The pages of `prefill.reference.prefill`, without its attention. In place where they are donated.

    Raises `KernelRefused` where pieces of pages of so many heads do not fit VMEM.
    """
    page = pages.page_tokens
    piece = min(page, PIECE_TOKENS)
    sizes = [tiled_bytes((2, pages.kv_heads, piece, pages.head_dim), pages.data.dtype)]
    if pages.scales is not None:
        sizes.append(tiled_bytes((2, pages.kv_heads, page), jnp.float32))
    needed = require_vmem("prefill", {"pieces of pages": (2 * RING + 4) * max(sizes)}, target, "page_tokens")
    options = {"interpret": target.interpret if interpret is None else interpret, "vmem_limit_bytes": needed}
    table, begins, counts, before = (jnp.asarray(x, jnp.int32) for x in (page_table, starts, lengths, prefixes))
    sequences = table, begins, counts, before
    numbers, scales = stored(jnp.stack([keys, values], axis=1), pages.data.dtype)  # [T, 2, Hkv, D]
    pieces = page_pieces(*sequences, keys.shape[0], page, piece)
    data = write_pieces(pages.data, jnp.moveaxis(numbers[pieces.rows], 1, 3), pieces, layer, **options)
    if pages.scales is None:
        return KVPages(data)
    pieces = page_pieces(*sequences, keys.shape[0], page, page)
    staged = jnp.moveaxis(scales[pieces.rows], 1, 3)  # [W, 2, Hkv, page]
    return KVPages(data, write_pieces(pages.scales, staged, pieces, layer, **options))
