"""Where a model's weights come from."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import jax
from jax.sharding import Sharding

from mcjax.cost.model_shape import ModelShape
from mcjax.cost.parameters import Parameter, parameters
from mcjax.models.quantised import QuantArray, Weight, quantise


class WeightSource(Protocol):
    """Asked once a parameter, by its dotted name, in the order of `cost.parameters`."""

    def __call__(self, name: str, parameter: Parameter, /) -> Weight: ...


class PlacedSource(Protocol):
    """A `WeightSource` that puts each parameter where it is to lie, be it asked for several places.

    `sharding` None: whole, on jax's default device. No more of it passes through the host's memory at a time than one
    parameter.
    """

    def __call__(self, name: str, parameter: Parameter, sharding: Sharding | None = None, /) -> Weight: ...


class Maker:
    """Hands a module its parameters: what is declared for the shape, from a source, quantised as the shape says."""

    def __init__(self, shape: ModelShape, source: WeightSource):
        self._declared = parameters(shape)
        self._source = source
        self._shape = shape

    def __call__(self, name: str) -> Weight:
        declared = self._declared[name]
        return as_stored(self._source(name, declared), declared, self._shape)


def as_stored(weight: Weight, parameter: Parameter, shape: ModelShape) -> Weight:
    """What a source gave, or an outline of it, quantised if the shape wants that and the parameter allows it."""
    if shape.quantisation == "none" or not parameter.summed or isinstance(weight, QuantArray):
        return weight
    rounded = partial(quantise, summed=parameter.summed)
    return jax.eval_shape(rounded, weight) if isinstance(weight, jax.ShapeDtypeStruct) else rounded(weight)
