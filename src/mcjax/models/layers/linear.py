"""The one product of activations with weights."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from mcjax.models.quantised import QuantArray, Weight

BLOCK_NUMBERS = 1 << 20
"""Of a quantised weight that are cast at once on a CPU: 4 MiB of float32 stay in its cache."""
SMALL_NUMBERS = 1 << 15
"""Weights of no more are cast whole."""


def einsum(spec: str, x: Float[Array, "..."], weight: Weight, flat: bool = True) -> Float[Array, "..."]:
    """`jnp.einsum(spec, x, weight)`, summed in float32 and given in float32, whatever is multiplied.

    What is summed over comes last in `x`, and first or last in the weight; letters that all three share are a batch.
    Float32 weights ask for full float32 products, which accelerators otherwise round. On XLA:CPU a bfloat16 product
    that is *summed* in bfloat16 is the slow path, and so is one of a single row: such a row is computed twice.

    A quantised weight is cast to the dtype of `x`, which is exact, and what comes out is multiplied by its scales.

    `flat`: multiply by matrices only. XLA:CPU transposes any other weight at every call; but a matrix of two halves
    side by side, each spread over devices, has to be exchanged between them at every call.
    """
    inputs_of, out = spec.split("->")
    ours, theirs = inputs_of.split(",")
    if isinstance(weight, QuantArray):
        return _product(ours, theirs, out, x, weight.numbers, flat) * _scales(theirs, out, weight.scales)
    return _product(ours, theirs, out, x, weight, flat)


def _product(ours: str, theirs: str, out: str, x: Array, weight: Shaped[Array, "..."], flat: bool) -> Array:
    if any(letter in theirs and letter in out for letter in ours):
        if x.dtype == jnp.bfloat16 and jax.default_backend() == "cpu":  # where XLA has no such product of many matrices
            x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
        weight, precision = _cast(weight, x)
        spec = f"{ours},{theirs}->{out}"
        return jnp.einsum(spec, x, weight, precision=precision, preferred_element_type=jnp.float32)
    summed = [letter for letter in ours if letter in theirs]
    count = len(summed)
    assert ours.endswith("".join(summed)), (ours, theirs)
    assert theirs.replace("".join(summed), "", 1) == out[len(ours) - count :], (ours, theirs, out)
    first = theirs.startswith("".join(summed))
    kept = weight.shape[count:] if first else weight.shape[:-count]
    inputs = math.prod(x.shape[len(ours) - count :])
    rows = x.reshape(-1, inputs)
    matrix = weight.reshape(inputs, *kept) if first else weight.reshape(*kept, inputs)
    if flat:
        matrix = matrix.reshape((inputs, -1) if first else (-1, inputs))
    height = rows.shape[0]
    if height == 1 and x.dtype == jnp.bfloat16 and jax.default_backend() == "cpu":
        rows = jnp.broadcast_to(rows, (2, inputs))
    if flat and weight.dtype == jnp.int8 and weight.size > SMALL_NUMBERS:
        product = _in_blocks(rows, matrix, first)
    else:
        product = _rows_times(rows, matrix, first)
    return product[:height].reshape(*x.shape[: len(ours) - count], *kept)


def _rows_times(rows: Float[Array, "N I"], matrix: Shaped[Array, "..."], first: bool) -> Float[Array, "N ..."]:
    """The sum over the matrix's first dimension, or else its last."""
    matrix, precision = _cast(matrix, rows)
    axes = (((1,), (0 if first else matrix.ndim - 1,)), ((), ()))
    return jax.lax.dot_general(rows, matrix, axes, precision=precision, preferred_element_type=jnp.float32)


def _in_blocks(rows: Float[Array, "N I"], matrix: Shaped[Array, "..."], first: bool) -> Float[Array, "N O"]:
    """The same of an int8 matrix, some of its outputs at a time. XLA:CPU writes out what it casts: outside of a loop
    (so there are two turns or more) many layers' weights at once, which costs memory, and more time than all else."""
    axis = 1 if first else 0
    outputs = matrix.shape[axis]
    block = max(1, min(BLOCK_NUMBERS // matrix.shape[1 - axis], -(-outputs // 2)))

    def one(number: Array, product: Array) -> Array:
        start = jnp.minimum(number * block, outputs - block)  # the last overlaps with the one before
        some = jax.lax.dynamic_slice_in_dim(matrix, start, block, axis)
        return jax.lax.dynamic_update_slice_in_dim(product, _rows_times(rows, some, first), start, 1)

    return jax.lax.fori_loop(0, -(-outputs // block), one, jnp.zeros((rows.shape[0], outputs), jnp.float32))


def _cast(weight: Shaped[Array, "..."], x: Array) -> tuple[Float[Array, "..."], jax.lax.Precision]:
    """A weight as a product takes it, and that product's precision."""
    if weight.dtype == jnp.int8:
        weight = weight.astype(x.dtype)
    return weight, jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def _scales(theirs: str, out: str, scales: Float[Array, "..."]) -> Float[Array, "..."]:
    """Scales of a weight of dimensions `theirs` as a factor of what has the dimensions `out`."""
    kept = [letter for letter in out if letter in theirs]
    sizes = dict(zip(theirs, scales.shape, strict=True))
    ordered = jnp.einsum(f"{theirs}->{''.join(kept)}", scales)  # what is left out has size one
    return ordered.reshape([sizes.get(letter, 1) for letter in out])
