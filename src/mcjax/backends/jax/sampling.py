"""Choosing the next token on the device: greedy, or by a counter-based generator keyed (seed, position).

A program of its own, behind the model's: so the model is compiled once whatever a request asks of its sampler, and
logits stay on the device.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


def sample(
    logits: Float[Array, "B V"],
    words: Int[Array, "B 3"],
    temperatures: Float[Array, " B"],
) -> Int[Array, "B 2"]:
    """One token a row, and whether it means anything: 0 beside it says that no logit was a finite number.

    `words` holds the high and low word of each row's seed, and the position where the token will lie. Temperature 0
    takes the largest logit, the lowest id among equals. Otherwise Gumbel noise is added to `logits / temperature`: a
    row's noise is a function of its seed and position, whatever its slot and batch mates.
    """

    def noise(seed: UInt32[Array, " 2"], position: Int[Array, ""]) -> Float[Array, " V"]:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, logits.shape[1:], jnp.float32)

    seeds = jax.lax.bitcast_convert_type(words[:, :2], jnp.uint32)
    warm = temperatures > 0
    scale = jnp.where(warm, temperatures, 1)[:, None]

    def noisy() -> Float[Array, "B V"]:
        return jnp.where(warm[:, None], logits / scale + jax.vmap(noise)(seeds, words[:, 2]), logits)

    # A vocabulary's worth of noise costs more than the rest together: not for a batch that is greedy throughout.
    scores = jax.lax.cond(warm.any(), noisy, lambda: logits)
    # NaN anywhere is the mark of a broken row; an infinite logit may be a mask.
    sound = jnp.isfinite(logits.max(axis=-1))
    return jnp.stack([jnp.argmax(scores, axis=-1).astype(jnp.int32), sound.astype(jnp.int32)], axis=1)
