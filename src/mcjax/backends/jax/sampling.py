"""Choosing the next token inside the compiled step: greedy, or by a counter-based generator keyed (seed, position)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


def sample(
    logits: Float[Array, "B V"],
    temperatures: Float[Array, " B"],
    seeds: UInt32[Array, "B 2"],
    positions: Int[Array, " B"],
) -> Int[Array, " B"]:
    """One token a row. `seeds` holds the high and low word of each row's seed; `positions` is where the token will lie.

    Temperature 0 takes the largest logit, the lowest id among equals. Otherwise Gumbel noise is added to
    `logits / temperature`: a row's noise is a function of its seed and position, whatever its slot and batch mates.
    """

    def noise(seed: UInt32[Array, " 2"], position: Int[Array, ""]) -> Float[Array, " V"]:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, logits.shape[1:], jnp.float32)

    warm = temperatures > 0
    scale = jnp.where(warm, temperatures, 1)[:, None]
    noisy = logits / scale + jax.vmap(noise)(seeds, positions)
    return jnp.argmax(jnp.where(warm[:, None], noisy, logits), axis=-1).astype(jnp.int32)
