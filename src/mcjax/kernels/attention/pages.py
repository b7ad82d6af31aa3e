"""How KV pages are kept on a device, read and written."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped


def page_dtype(dtype: str) -> np.dtype[Any]:
    """The dtype of the page array of a model of `dtype`, on this process's default platform.

    XLA:CPU cannot write into a bfloat16 array: it converts the *whole* of it to float32 and back around each write.
    There the pages are 16-bit words with the same bits, which move as they are.
    """
    if dtype == "bfloat16" and jax.default_backend() == "cpu":
        return np.dtype(np.uint16)
    return jnp.dtype(dtype)


def read(
    pages: Shaped[Array, "P L 2 page Hkv D"], layer: int, page_table: Int[Array, "B N"]
) -> tuple[Float[Array, "B S Hkv D"], Float[Array, "B S Hkv D"]]:
    """Keys and values of one layer, from the pages that a table names, in the table's order."""
    count, layers, _, page_tokens, kv_heads, head_dim = pages.shape
    # Long rows and one index: XLA:CPU computes the indices of a gather number by number.
    halves = pages.reshape(count * layers * 2, page_tokens, kv_heads * head_dim)
    first = (page_table * layers + layer) * 2
    shape = (page_table.shape[0], page_table.shape[1] * page_tokens, kv_heads, head_dim)
    return _values(halves[first]).reshape(shape), _values(halves[first + 1]).reshape(shape)


def write(
    pages: Shaped[Array, "P L 2 page Hkv D"],
    layer: int,
    places: tuple[Int[Array, "B T"], Int[Array, "B T"]],
    entries: Float[Array, "B T 2 Hkv D"],
) -> Shaped[Array, "P L 2 page Hkv D"]:
    """The pages with each token's key and value at its page and offset."""
    page, offset = places
    if pages.dtype == jnp.uint16:
        entries = jax.lax.bitcast_convert_type(entries, jnp.uint16)
    return pages.at[page, layer, :, offset].set(entries)


def _values(words: Shaped[Array, "..."]) -> Float[Array, "..."]:
    return jax.lax.bitcast_convert_type(words, jnp.bfloat16) if words.dtype == jnp.uint16 else words
