"""Weights that no test has to think about, and a batch for a layer alone."""

from __future__ import annotations

import zlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from mcjax.cost.parameters import Parameter
from mcjax.models.layers.step import Step


class Drawn:
    """A `WeightSource`: normal numbers by name, biases and gains too. Keeps them in float64, as the layer has them."""

    def __init__(self, dtype: str = "float32"):
        self.dtype = jnp.dtype(dtype)
        self.wide: dict[str, np.ndarray] = {}

    def __call__(self, name: str, parameter: Parameter) -> Any:
        drawn = np.random.default_rng(zlib.crc32(name.encode())).normal(size=parameter.shape)
        if parameter.fan_in:
            drawn = drawn / np.sqrt(parameter.fan_in)
        elif parameter.init == "ones":
            drawn = 1 + drawn / 4
        weight = jnp.asarray(drawn, self.dtype)
        self.wide[name] = np.asarray(weight.astype(jnp.float32), np.float64)
        return weight


def padded_step(batch: tuple[int, ...], flat: bool = True) -> Any:
    """Of a layer that looks at neither positions nor pages: all is padding."""
    nothing: Any = None
    return Step(jnp.full(batch, -1), nothing, nothing, nothing, nothing, flat)
