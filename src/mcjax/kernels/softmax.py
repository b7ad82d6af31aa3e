"""The weights of attention, as the references define them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def weights_of(
    queries: Float[Array, "T Hkv G D"],
    keys: Float[Array, "S Hkv D"],
    visible: Bool[Array, "T S"],
    soft_cap: float | None,
    scale: float | None,
) -> tuple[Float[Array, "T Hkv G S"], Float[Array, "T Hkv G"]]:
    """Float32 weights that sum to one, and the logarithm of the sum of exponentials that they were divided by.

    A query that sees nothing has weights of zero and a logarithm of minus infinity. What it may not see may be NaN.
    """
    scores = jnp.einsum(
        "tkgd,skd->tkgs", queries.astype(jnp.float32), keys.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    scores = scores * (queries.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    peak = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(peak), peak, 0))
    total = weights.sum(axis=-1)
    return weights / jnp.maximum(total, 1e-37)[..., None], jnp.log(total) + jnp.where(total > 0, peak[..., 0], 0)
