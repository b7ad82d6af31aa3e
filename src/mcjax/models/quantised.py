"""Weights of eight bits beside plain ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import jax
from jaxtyping import Array, Float, Int8


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


Weight: TypeAlias = Array | QuantArray
