"""Rotary positions (RoFormer, arXiv:2104.09864): pairs (i, i + D/2), by a table computed in float64.

A table and not a formula inside the program: a vectorised cosine may round its last lanes otherwise, and then a token's
bits would depend on its place in the chunk. What a row of the table holds depends on its position alone, so that a key
is the same to every request that finds it in a cache.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import NDArray

from mcjax.cost.architecture import Rope
from mcjax.errors import ConfigError


def rotary_table(rope: Rope, dim: int, length: int) -> Float[Array, "S 2 D/2"]:
    """Cosine and sine of every position below `length`, for heads that turn `dim` numbers.

    Raises `ConfigError` for `dynamic` scaling of heads too small for it.
    """
    positions = np.arange(length, dtype=np.float64)
    angles = positions[:, None] * frequencies(rope, dim, positions)
    turns = np.stack([np.cos(angles), np.sin(angles)], axis=1) * attention_factor(rope)
    return jnp.asarray(turns, dtype=jnp.float32)


def frequencies(rope: Rope, dim: int, positions: NDArray[np.float64]) -> NDArray[np.float64]:
    """Radians a position, `[D/2]`; of `dynamic`, `[S, D/2]`: those of each position."""
    if rope.scaling == "dynamic" and dim <= 2:
        raise ConfigError("model.rope.scaling", rope.scaling, f"needs heads of more than 2 numbers, not {dim}")
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    plain = rope.theta**-exponents
    match rope.scaling:
        case "linear":
            return plain / rope.factor
        case "dynamic":
            return _dynamic(rope, dim, positions)
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, plain)
        case _:
            return plain


def attention_factor(rope: Rope) -> float:
    """What cosines and sines are multiplied by: 1 unless `yarn` (arXiv:2309.00071, 3.4; mscale is DeepSeek-V2's)."""
    if rope.scaling != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)


def _dynamic(rope: Rope, dim: int, positions: NDArray[np.float64]) -> NDArray[np.float64]:
    """NTK-aware (arXiv:2309.00071, 3.1) with a base that grows once the context outgrows that of training.

    Growth is that of a context which ends with the position. So the frequencies are plain within the trained context,
    and beyond it each token is turned as it is when a sequence grows by one token at a time. They may not follow the
    length of the prompt: a cached key would then be wrong for every request of another length.
    """
    context = np.maximum(positions + 1, rope.original_context_tokens)
    growth = rope.factor * context / rope.original_context_tokens - (rope.factor - 1)
    base = rope.theta * growth ** (dim / (dim - 2))
    return base[:, None] ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


def _llama3(rope: Rope, plain: NDArray[np.float64]) -> NDArray[np.float64]:
    """Llama 3.1's: low frequencies are divided, high ones stay, and those between are mixed."""
    turns = rope.original_context_tokens * plain / (2 * math.pi)  # within the trained context
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return plain * (kept + (1 - kept) / rope.factor)


def _yarn(rope: Rope, plain: NDArray[np.float64]) -> NDArray[np.float64]:
    """YaRN (arXiv:2309.00071, 3.2): a ramp over dimensions, between those that turn often and those that hardly do."""
    half = len(plain)

    def dimension(turns: float) -> float:
        """The one that turns so often within the trained context."""
        wavelengths = rope.original_context_tokens / (2 * math.pi * turns)
        return half * math.log(wavelengths) / math.log(rope.theta)

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    divided = np.clip((np.arange(half) - low) / (high - low or 0.001), 0, 1)
    return plain * (1 - divided + divided / rope.factor)


def rotate(x: Float[Array, "B T H D"], turn: Float[Array, "B T 2 D/2"]) -> Float[Array, "B T H D"]:
    """Turn each pair (i, i + D/2) of `x` by its position's angle."""
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = turn[:, :, None, 0], turn[:, :, None, 1]
    return jnp.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1).astype(x.dtype)
