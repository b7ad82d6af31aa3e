"""Where the arrays of one instance lie: on a device, or spread over a mesh of a few. The one place that builds meshes.

Its axes are `kernels.axes`. `data` and `expert` are as long as a place says. Of the devices that are left, `tensor` has
as many as there are key heads for; the others share a key head along `group`. Which logical axis goes over which of
them, `models.sharding.Rules` says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as MemoryLayout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from mcjax.cost.model_shape import ModelShape
from mcjax.kernels.axes import DATA, EXPERT, GROUP, TENSOR
from mcjax.kernels.base import Site
from mcjax.kernels.choice import Layout
from mcjax.kernels.target import Target
from mcjax.models.sharding import PAGES, Rules, axes_of

Device: TypeAlias = Any
"""A `jax.Device`, which type checkers take for a variable."""


@dataclass(frozen=True)
class Place:
    """One instance's devices. Of two places that are equal, programs and weights are shared."""

    devices: tuple[Device, ...]
    expert: int = 1
    """How many share the experts: a divisor of their number, and of that of the devices."""
    data: int = 1
    """How many share the rows of a batch."""
    rules: Rules = Rules()  # noqa: RUF009 (frozen)

    def __post_init__(self) -> None:
        if len(self.devices) % (self.expert * self.data):
            raise ValueError(f"{len(self.devices)} devices along expert={self.expert} and data={self.data}")

    @classmethod
    def of(cls, where: Device | Place) -> Place:
        """A place as it is, or that of one device."""
        return where if isinstance(where, Place) else cls((where,))

    def __str__(self) -> str:
        return ", ".join(str(device) for device in self.devices)

    @property
    def size(self) -> int:
        return len(self.devices)

    @cached_property
    def whole(self) -> jax.sharding.Sharding:
        """Everything on every device."""
        if self.size == 1:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(Mesh(np.array(self.devices), (TENSOR,), axis_types=(AxisType.Auto,)), PartitionSpec())

    def weight(self, path: Sequence[Any], sizes: Sequence[int], shape: ModelShape) -> jax.sharding.Sharding:
        """Where an array of a parameter lies, by its path in the model and its own sizes: of scales, some are one."""
        return self._cut(axes_of(path, shape).axes, sizes, shape)

    def pages(self, shape: ModelShape, layout: Layout) -> jax.sharding.Sharding:
        """Where KV pages lie."""
        return self._cut(PAGES[layout], self._paged(layout, shape), shape)

    def pages_format(self, shape: ModelShape, layout: Layout) -> Any:
        """And how they lie there in memory, where kernels depend on it: see `KVPages.formats`."""
        sharding = self.pages(shape, layout)
        if layout == "tokens_first" or self.platform == "cpu":
            return sharding
        return Format(MemoryLayout(tuple(range(len(PAGES[layout])))), sharding)

    def blocks(self, shape: ModelShape) -> jax.sharding.Sharding:
        """Where canonical blocks lie, on their way out and in."""
        return self._cut(PAGES["tokens_first"], self._paged("tokens_first", shape), shape)

    def rows(self, shape: ModelShape, count: int) -> jax.sharding.Sharding:
        """Where a batch of so many rows lies, of any further dimensions."""
        return self._cut(("rows",), (count,), shape)

    def site(self, shape: ModelShape) -> Site:
        """What kernels have to know of the place."""
        return Site(Target.of(self.devices[0]), None if self.size == 1 else self._mesh(shape))

    @property
    def platform(self) -> str:
        return self.devices[0].platform

    @staticmethod
    def _paged(layout: Layout, shape: ModelShape) -> tuple[int, ...]:
        """An array of one page of one token, which shows how many key heads there are."""
        heads, axes = shape.cache_heads, PAGES[layout]
        return tuple(heads if axis == "kv_heads" else 1 for axis in axes)

    def _cut(self, axes: Sequence[str | None], sizes: Sequence[int], shape: ModelShape) -> jax.sharding.Sharding:
        if self.size == 1:
            return self.whole
        mesh = self._mesh(shape)
        return NamedSharding(mesh, PartitionSpec(*self.rules.cut(axes, sizes, mesh.shape)))

    def _mesh(self, shape: ModelShape) -> Mesh:
        ways = self.size // (self.data * self.expert)
        tensor = math.gcd(ways, shape.cache_heads)
        devices = np.array(self.devices).reshape(self.data, self.expert, tensor, ways // tensor)
        # Auto: the compiler finds the way from how weights and pages lie; explicit axes would bind every operation.
        return Mesh(devices, (DATA, EXPERT, TENSOR, GROUP), axis_types=(AxisType.Auto,) * 4)
