"""A model's parameters on the devices of each place, brought there once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from mcjax.backends.jax.placement import Place
from mcjax.cost.parameters import parameters
from mcjax.models.decoder import Decoder
from mcjax.models.sharding import name_of
from mcjax.models.weights import PlacedSource, as_stored

TOLD_NUMBERS = 8 << 20
"""Of a parameter whose loading is told of: less takes no time to speak of."""


class PlacedWeights:
    """Of a model that has its parameters, or of an outline of one (`catalogue.outline`) and the source that has them.

    With a source each place's devices get their shards from it, and nothing lies anywhere else. An outline without one
    stays one: programs compile with it, and cannot be run.
    """

    def __init__(self, model: Decoder, source: PlacedSource | None = None):
        self.shape = model.shape
        self.graph, state = nnx.split(model)
        found, self.tree = jax.tree_util.tree_flatten_with_path(state)
        self.paths = [path for path, _ in found]
        self.leaves = [leaf for _, leaf in found]
        self.told: Callable[[str], None] = lambda what: None
        """Hears which large parameter is being brought where."""
        self._source = source
        self._lock = threading.Lock()
        self._places: dict[Place, list[Any]] = {}

    def on(self, place: Place) -> list[Any]:
        """The leaves of the model's state, laid out for a place. Thread-safe."""
        with self._lock:
            if place not in self._places:
                self._places[place] = self._laid(place)
            return self._places[place]

    def _laid(self, place: Place) -> list[Any]:
        declared = parameters(self.shape)
        asked: dict[str, list[Any]] = {}  # a parameter of two arrays (`QuantArray`) has two leaves
        laid: list[Any] = []
        for path, leaf in zip(self.paths, self.leaves, strict=True):
            sharding = place.weight(path, leaf.shape, self.shape)
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                laid.append(jax.device_put(leaf, sharding))
            elif self._source is None:
                laid.append(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding))
            else:
                name = name_of(path)
                if name not in asked:  # the first leaf of a quantised one is cut as the whole is
                    if declared[name].size >= TOLD_NUMBERS:
                        self.told(f"weights for {place}: {name} ({len(asked) + 1} of {len(declared)})")
                    weight = self._source(name, declared[name], sharding)
                    asked[name] = jax.tree.leaves(as_stored(weight, declared[name], self.shape))
                laid.append(jax.device_put(asked[name].pop(0), sharding))
        return laid
