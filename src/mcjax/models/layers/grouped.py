"""The product of rows with weights of which each row has its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from mcjax.models.quantised import QuantArray, Weight


def grouped(
    x: Float[Array, "N I"], weight: Weight, owners: Int[Array, " N"], flat: bool = True
) -> Float[Array, "N ..."]:
    """Row n times `weight[owners[n]]`, summed and given in float32; `owners` ascend. Of a weight `[X, I, ...]`.

    Compiled for a CPU, every row meets every weight, as zeros but for its own: X times the work, and a row's bits
    depend on that row alone. Precision, quantised weights and `flat` are `linear.einsum`'s.
    """
    numbers = weight.numbers.astype(x.dtype) if isinstance(weight, QuantArray) else weight
    precision = jax.lax.Precision.HIGHEST if numbers.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    sizes = jnp.bincount(owners, length=numbers.shape[0]).astype(jnp.int32)

    def product(matrices: Shaped[Array, "X I O"]) -> Float[Array, "N O"]:
        return jax.lax.ragged_dot(x, matrices, sizes, precision=precision, preferred_element_type=jnp.float32)

    count, inputs, *kept = numbers.shape
    if flat or len(kept) == 1:
        found = product(numbers.reshape(count, inputs, -1)).reshape(-1, *kept)
    else:
        found = jnp.stack([product(numbers[:, :, part]) for part in range(kept[0])], axis=1)
    if isinstance(weight, QuantArray):
        return found * weight.scales[:, 0][owners]
    return found
