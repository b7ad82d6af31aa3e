"""Where a model's weights come from."""

from __future__ import annotations

from typing import Protocol

from mcjax.cost.model_shape import ModelShape
from mcjax.cost.parameters import Parameter, parameters
from mcjax.models.quantised import QuantArray, Weight, quantise


class WeightSource(Protocol):
    """Asked once a parameter, by its dotted name, in the order of `cost.parameters`."""

    def __call__(self, name: str, parameter: Parameter, /) -> Weight: ...


class Maker:
    """Hands a module its parameters: what is declared for the shape, from a source, quantised as the shape says."""

    def __init__(self, shape: ModelShape, source: WeightSource):
        self._declared = parameters(shape)
        self._source = source
        self._int8 = shape.quantisation == "int8"

    def __call__(self, name: str) -> Weight:
        declared = self._declared[name]
        weight = self._source(name, declared)
        if self._int8 and declared.summed and not isinstance(weight, QuantArray):
            return quantise(weight, declared.summed)
        return weight
