"""What a layout says of pages is what lies on the devices of a mesh, and what goes from one mesh to another."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from mcjax.backends.at_rest import host_layout
from mcjax.backends.jax.placement import Place
from mcjax.cost.model_shape import ModelShape
from mcjax.transfer.layout.describe import Layout, tensor_shards
from mcjax.transfer.layout.placed import Blocks, Placed
from mcjax.transfer.layout.plan import plan
from mcjax.transfer.layout.staged import apply

PAGES, PAGE_TOKENS = 5, 4


def shape_of(kv_heads: int) -> ModelShape:
    return ModelShape("tiny", 3, 32, 8, kv_heads, 8, 24, 259, dtype_bytes=4, kv_dtype_bytes=4)


def spread(layout: Layout, devices: int) -> Layout:
    """The same model's blocks over a mesh, as `Place` lays them."""
    (group,) = layout.groups
    shards = tensor_shards(len(group.layers), group.kv_heads, devices)
    return replace(layout, groups=(replace(group, shards=shards),))


def on_devices(numbers: np.ndarray, place: Place, shape: ModelShape) -> list[np.ndarray]:
    """`[P, page_bytes]` of each device of the place."""
    array = jax.device_put(numbers, place.blocks(shape))
    shards = sorted(array.addressable_shards, key=lambda shard: place.devices.index(shard.device))
    return [np.ascontiguousarray(shard.data).reshape(PAGES, -1).view(np.uint8) for shard in shards]


def placed(pages: np.ndarray) -> Placed:
    return Placed(pages.reshape(-1), Blocks(np.arange(PAGES), pages.shape[1]))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_pages_of_one_mesh_become_those_of_another(kv_heads: int) -> None:
    shape = shape_of(kv_heads)
    host = host_layout(shape, shape.kv_format(PAGE_TOKENS, "weights"))
    assert host is not None
    assert host.groups[0].block_bytes(0) == shape.kv_format(PAGE_TOKENS, "weights").block_bytes
    page: tuple[Any, ...] = shape.page_shape(PAGE_TOKENS)
    numbers = np.random.default_rng(0).standard_normal((PAGES, *page)).astype(np.float32)
    devices = jax.local_devices()
    there = {count: on_devices(numbers, Place(tuple(devices[:count])), shape) for count in (1, 2, 4)}
    for source, target in itertools.product(there, there):
        layouts = spread(host, source), spread(host, target)
        sources = {("full", rank): placed(pages) for rank, pages in enumerate(there[source])}
        targets = {("full", rank): placed(np.zeros_like(pages)) for rank, pages in enumerate(there[target])}
        apply(plan(*layouts), sources, targets, 0, PAGES * PAGE_TOKENS)
        for rank, pages in enumerate(there[target]):
            assert (targets["full", rank].buffer == pages.reshape(-1)).all(), (source, target, rank)
