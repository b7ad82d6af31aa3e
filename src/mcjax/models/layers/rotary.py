"""Rotary positions (arXiv:2104.09864): pairs (i, i + D/2), by a table computed in float64.

A table and not a formula inside the program: a vectorised cosine may round its last lanes otherwise, and then a token's
bits would depend on its place in the chunk.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mcjax.cost.architecture import Rope
from mcjax.errors import ConfigError


def rotary_table(rope: Rope, dim: int, length: int) -> Float[Array, "S 2 D/2"]:
    """Cosine and sine of every position below `length`, for heads that turn `dim` numbers."""
    if rope.scaling != "none":
        raise ConfigError("rope.scaling", rope.scaling, "not supported", ("none",))
    frequencies = rope.theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    angles = np.arange(length, dtype=np.float64)[:, None] * frequencies
    return jnp.asarray(np.stack([np.cos(angles), np.sin(angles)], axis=1), dtype=jnp.float32)


def rotate(x: Float[Array, "B T H D"], turn: Float[Array, "B T 2 D/2"]) -> Float[Array, "B T H D"]:
    """Turn each pair (i, i + D/2) of `x` by its position's angle."""
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = turn[:, :, None, 0], turn[:, :, None, 1]
    return jnp.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1).astype(x.dtype)
