"""How KV pages are kept on a device, read and written by XLA, in either layout (`choice.Layout`)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from mcjax.kernels.choice import Layout


def block_dtype(dtype: str, platform: str) -> np.dtype[Any]:
    """The dtype of the canonical blocks of a model of `dtype`, on a platform.

    XLA:CPU cannot write into a bfloat16 array: it converts the *whole* of it to float32 and back around each write.
    There blocks, and pages whose tokens come first, are 16-bit words with the same bits, which move as they are.
    """
    if dtype == "bfloat16" and platform == "cpu":
        return np.dtype(np.uint16)
    return jnp.dtype(dtype)


def page_dtype(dtype: str, layout: Layout, platform: str) -> np.dtype[Any]:
    """The dtype of the page array of a model of `dtype`.

    Pages whose heads come first are of the model's dtype everywhere, since that is what Pallas kernels compute with: on
    a CPU those are interpreted, and copy the whole array at every step anyway.
    """
    return block_dtype(dtype, platform) if layout == "tokens_first" else jnp.dtype(dtype)


def sizes(pages: Shaped[Array, "P L C ..."], layout: Layout) -> tuple[int, int]:
    """`(page_tokens, kv_heads)`"""
    return (pages.shape[3], pages.shape[4]) if layout == "tokens_first" else (pages.shape[4], pages.shape[3])


def read(
    pages: Shaped[Array, "P L C ..."], layer: int, page_table: Int[Array, "B N"], layout: Layout = "tokens_first"
) -> tuple[Float[Array, "B S Hkv D"], Float[Array, "B S Hkv D"]]:
    """Keys and values of one layer, from the pages that a table names, in the table's order; of latents, the same."""
    count, layers, entries, head_dim = (pages.shape[axis] for axis in (0, 1, 2, 5))
    page_tokens, kv_heads = sizes(pages, layout)
    # Long rows and one index: XLA:CPU computes the indices of a gather number by number.
    halves = pages.reshape(count * layers * entries, *pages.shape[3:4], -1)
    first = (page_table * layers + layer) * entries
    shape = (page_table.shape[0], page_table.shape[1] * page_tokens, kv_heads, head_dim)

    def half(index: Int[Array, "B N"]) -> Float[Array, "B S Hkv D"]:
        found = values_of(halves[index])
        if layout == "heads_first":
            found = jnp.swapaxes(found.reshape(*index.shape, kv_heads, page_tokens, head_dim), 2, 3)
        return found.reshape(shape)

    keys = half(first)
    return keys, keys if entries == 1 else half(first + 1)


def places_of(
    pages: Shaped[Array, "P L C ..."], page_table: Int[Array, "B N"], positions: Int[Array, "B T"], layout: Layout
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Page and offset of each token: of padding, a place in the last page, which is scratch."""
    page_tokens, _ = sizes(pages, layout)
    valid = positions >= 0
    safe = jnp.where(valid, positions, 0)
    page = jnp.where(valid, jnp.take_along_axis(page_table, safe // page_tokens, axis=1), pages.shape[0] - 1)
    return page, safe % page_tokens


def write(
    pages: Shaped[Array, "P L C ..."],
    layer: int,
    places: tuple[Int[Array, "B T"], Int[Array, "B T"]],
    entries: Float[Array, "B T C Hkv D"],
    layout: Layout = "tokens_first",
) -> Shaped[Array, "P L C ..."]:
    """The pages with each token's key and value at its page and offset."""
    page, offset = places
    if pages.dtype == jnp.uint16:
        entries = jax.lax.bitcast_convert_type(entries, jnp.uint16)
    if layout == "heads_first":
        return pages.at[page, layer, :, :, offset].set(entries.astype(pages.dtype))
    return pages.at[page, layer, :, offset].set(entries)


def values_of(words: Shaped[Array, "..."]) -> Float[Array, "..."]:
    """Numbers of the model's dtype."""
    return jax.lax.bitcast_convert_type(words, jnp.bfloat16) if words.dtype == jnp.uint16 else words
