"""Weights go straight to the devices of each place, as if a whole model had been cut up; and only once."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from mcjax.backends.jax.placed_weights import PlacedWeights
from mcjax.backends.jax.placement import Place
from mcjax.backends.jax.programs import Programs
from mcjax.cost.parameters import Parameter, parameters
from mcjax.models import builtin, catalogue

SHAPE = builtin.DEFAULT_SHAPE


class Counted:
    """A source that notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._source = builtin.SeededWeights(SHAPE, 0)

    def __call__(self, name: str, parameter: Parameter, sharding: Any = None) -> jax.Array:
        self.asked.append(name)
        return self._source(name, parameter, sharding)


def test_each_device_gets_its_part_and_nobody_the_whole(lab: Any) -> None:
    source = Counted()
    straight = PlacedWeights(catalogue.outline(SHAPE, lab.geometry.max_context_tokens), source)
    cut_up = PlacedWeights(builtin.build(SHAPE, 0, lab.geometry.max_context_tokens))
    assert source.asked == []
    for devices in (1, 2, 4):
        place = Place(tuple(jax.local_devices()[:devices]))
        assert straight.on(place) is straight.on(place)
        for path, ours, theirs in zip(straight.paths, straight.on(place), cut_up.on(place), strict=True):
            assert ours.sharding == theirs.sharding, path
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs), str(path))
            for mine, other in zip(ours.addressable_shards, theirs.addressable_shards, strict=True):
                assert (mine.device, mine.index) == (other.device, other.index)
                np.testing.assert_array_equal(np.asarray(mine.data), np.asarray(other.data))
    assert sorted(source.asked) == sorted([*parameters(SHAPE)] * 3)


def test_programs_of_several_geometries_share_weights(lab: Any) -> None:
    placed = PlacedWeights(catalogue.outline(SHAPE, lab.geometry.max_context_tokens), Counted())
    first, second = Programs(placed, lab.geometry), Programs(placed, lab.geometry)
    device = jax.local_devices()[0]
    assert first.on(device).weights is second.on(device).weights
    rows = np.zeros((1, 2 + 32 + lab.geometry.table_width), np.int32)
    rows[0, :2] = 1, 0
    rows[0, 34:] = lab.geometry.pages
    ours, _ = first.on(device).model(1, 32)(first.on(device).weights, first.new_pages(device), rows)
    plain = lab.programs.on(device)
    theirs, _ = plain.model(1, 32)(plain.weights, lab.programs.new_pages(device), rows)
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_an_outline_without_a_source_has_no_numbers() -> None:
    outline = PlacedWeights(catalogue.outline(SHAPE, 8))
    place = Place.of(jax.local_devices()[0])
    described = [leaf for leaf in outline.on(place) if isinstance(leaf, jax.ShapeDtypeStruct)]
    assert len(described) == len(parameters(SHAPE))
