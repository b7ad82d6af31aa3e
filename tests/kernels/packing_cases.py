"""Pages and blocks for the kernels that pack, with NaN wherever none was written."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mcjax.kernels.kv_pack.blocks import KVBlocks
from mcjax.kernels.pages import LARGEST, KVPages, stored

HEAD_DIM, PAGE_TOKENS = 80, 16
DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")


def filled_pages(rng: np.random.Generator, pages: int, kv_heads: int, dtype: str, layers: int = 1) -> KVPages:
    """Vectors of very different sizes; some of them NaN as a whole, some in one number, some infinite in one."""
    shape = (pages, layers, 2, kv_heads, PAGE_TOKENS, HEAD_DIM)
    values = rng.normal(size=shape) * np.exp2(rng.integers(-40, 40, size=(*shape[:-1], 1)))
    values[rng.random(shape[:-1]) < 0.1] = np.nan
    values[..., 3][rng.random(shape[:-1]) < 0.05] = np.nan
    values[..., 70][rng.random(shape[:-1]) < 0.05] = np.inf
    values[rng.random(shape[:-1]) < 0.05] = 0
    numbers, scales = stored(jnp.asarray(values, jnp.float32), dtype)
    return KVPages(numbers, scales if dtype in LARGEST else None)


def bits(array: Any) -> np.ndarray:
    array = np.asarray(array)
    return array.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def assert_same_bits(found: KVPages | KVBlocks, wanted: KVPages | KVBlocks) -> None:
    """Of all arrays; of NaN only that it is one."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        assert one.dtype == other.dtype
        nan = np.isnan(np.asarray(other).astype(np.float32))
        np.testing.assert_array_equal(np.isnan(np.asarray(one).astype(np.float32)), nan)
        np.testing.assert_array_equal(np.where(nan, 0, bits(one)), np.where(nan, 0, bits(other)))
