"""Partial results of attention over parts of a context, put together."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def merge(
    mixed: Float[Array, "X ... D"], logs: Float[Array, "X ..."]
) -> tuple[Float[Array, "... D"], Float[Array, "..."]]:
    """The result over all `X` parts, from each part's result and the logarithm of its softmax's sum.

    The parts share no key. A part that saw nothing (minus infinity) counts for nothing, even if its result is NaN;
    where none saw anything, the result is zero and minus infinity. Sums are in float32, the result in the dtype of
    `mixed`.
    """
    peak = jnp.max(logs, axis=0)
    safe = jnp.where(jnp.isfinite(peak), peak, 0)
    shares = jnp.exp(logs - safe)  # [X, *rows]
    total = shares.sum(axis=0)
    clean = jnp.where((shares > 0)[..., None], mixed.astype(jnp.float32), 0)
    result = (clean * shares[..., None]).sum(axis=0) / jnp.maximum(total, 1e-37)[..., None]
    return result.astype(mixed.dtype), jnp.where(total > 0, jnp.log(total) + safe, -jnp.inf)
