"""Weights of eight bits beside plain ones: symmetric, a scale an output channel (LLM.int8(), arXiv:2208.07339, 2.1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

MOST = 127
"""The largest number of eight bits; -128 is not used, so that both signs reach equally far."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantArray:
    """`numbers * scales`: a scale an output channel, so that a product is scaled once it is summed."""

    numbers: Int8[Array, "..."]
    scales: Float[Array, "..."]
    """Float32, of as many dimensions: of size one along those that products sum over."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight that it stands for."""
        return self.numbers.shape

    @property
    def ndim(self) -> int:
        return self.numbers.ndim

    def __getitem__(self, index: Any) -> QuantArray:
        """Of dimensions with a scale each: all of it (`...`), or rows of an embedding."""
        return QuantArray(self.numbers[index], self.scales[index])

    def plain(self, dtype: Any) -> Float[Array, "..."]:
        """The weight that it stands for, rounded to `dtype`."""
        return (self.numbers.astype(jnp.float32) * self.scales).astype(dtype)


Weight: TypeAlias = Array | QuantArray


@partial(jax.jit, static_argnames="summed")
def quantise(weight: Float[Array, "..."], summed: tuple[int, ...]) -> QuantArray:
    """Round to the nearest of 255 steps, of equal size in an output channel; `summed` are the other dimensions.

    No number is further off than half a step: `max|channel| / 254` (and float32's rounding).
    """
    wide = weight.astype(jnp.float32)
    scales = jnp.max(jnp.abs(wide), axis=summed, keepdims=True) / MOST
    steps = jnp.round(wide / jnp.where(scales == 0, 1, scales))
    return QuantArray(jnp.clip(steps, -MOST, MOST).astype(jnp.int8), scales)
