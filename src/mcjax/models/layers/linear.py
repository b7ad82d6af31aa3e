"""The one product of activations with weights."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mcjax.models.quantised import QuantArray, Weight


def einsum(spec: str, x: Float[Array, "..."], weight: Weight, flat: bool = True) -> Float[Array, "..."]:
    """`jnp.einsum(spec, x, weight)`, summed in float32 and given in float32, whatever is multiplied.

    What is summed over comes last in `x`, and first or last in the weight; letters that all three share are a batch.
    Float32 weights ask for full float32 products, which accelerators otherwise round. On XLA:CPU a bfloat16 product
    that is *summed* in bfloat16 is the slow path, and so is one of a single row: such a row is computed twice.

    `flat`: multiply by matrices only. XLA:CPU transposes any other weight at every call; but a matrix of two halves
    side by side, each spread over devices, has to be exchanged between them at every call.
    """
    if isinstance(weight, QuantArray):
        raise NotImplementedError("quantised weights")
    precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    inputs_of, out = spec.split("->")
    ours, theirs = inputs_of.split(",")
    if any(letter in theirs and letter in out for letter in ours):
        if x.dtype == jnp.bfloat16 and jax.default_backend() == "cpu":  # where XLA has no such product of many matrices
            x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
        return jnp.einsum(spec, x, weight, precision=precision, preferred_element_type=jnp.float32)
    summed = [letter for letter in ours if letter in theirs]
    count = len(summed)
    assert ours.endswith("".join(summed)), spec
    assert theirs.replace("".join(summed), "", 1) == out[len(ours) - count :], spec
    first = theirs.startswith("".join(summed))
    kept = weight.shape[count:] if first else weight.shape[:-count]
    inputs = math.prod(x.shape[len(ours) - count :])
    rows = x.reshape(-1, inputs)
    matrix = weight.reshape(inputs, *kept) if first else weight.reshape(*kept, inputs)
    if flat:
        matrix = matrix.reshape((inputs, -1) if first else (-1, inputs))
    height = rows.shape[0]
    if height == 1 and weight.dtype == jnp.bfloat16 and jax.default_backend() == "cpu":
        rows = jnp.broadcast_to(rows, (2, inputs))
    axes = (((1,), (0 if first else matrix.ndim - 1,)), ((), ()))
    product = jax.lax.dot_general(rows, matrix, axes, precision=precision, preferred_element_type=jnp.float32)
    return product[:height].reshape(*x.shape[: len(ours) - count], *kept)
