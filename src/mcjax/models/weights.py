"""Where a model's weights come from."""

from __future__ import annotations

from typing import Protocol

from jax.sharding import Sharding

from mcjax.cost.parameters import Parameter
from mcjax.models.quantised import Weight


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
    """Hands a module its parameters: what is declared for the shape, from a source."""

    def __init__(self, declared: dict[str, Parameter], source: WeightSource):
        self._declared = declared
        self._source = source

    def __call__(self, name: str) -> Weight:
        return self._source(name, self._declared[name])
