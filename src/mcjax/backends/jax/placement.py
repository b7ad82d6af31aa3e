"""Where the arrays of one instance lie: on a device, or spread over a few along the axes `tensor` and `group`.

`tensor` is as long as there are devices, but no longer than there are key heads; the devices that are left over share a
key head along `group`. Key heads and their pages are spread over `tensor`, everything else that is spread over both.
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
from mcjax.kernels.base import GROUP, TENSOR, Site
from mcjax.kernels.choice import Layout
from mcjax.kernels.target import Target
from mcjax.models.sharding import PAGES, axes_of

Device: TypeAlias = Any
"""A `jax.Device`, which type checkers take for a variable."""


@dataclass(frozen=True)
class Place:
    """One instance's devices. Of two places that are equal, programs and weights are shared."""

    devices: tuple[Device, ...]

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

        spec: list[tuple[str, ...] | None] = []
        for axis, size in zip(axes, sizes, strict=True):
            names = (TENSOR,) if axis == "kv_heads" else (TENSOR, GROUP)
            # What does not go evenly, such as an odd vocabulary, lies on every device. Of two that do, the first is
            # cut: experts lie on devices whole.
            cut = axis is not None and not any(spec) and size % math.prod(mesh.shape[name] for name in names) == 0
            spec.append(names if cut else None)
        return NamedSharding(mesh, PartitionSpec(*spec))

    def _mesh(self, shape: ModelShape) -> Mesh:
        tensor = math.gcd(self.size, shape.cache_heads)
        # Auto: the compiler finds the way from how weights and pages lie; explicit axes would bind every operation.
        devices = np.array(self.devices).reshape(tensor, self.size // tensor)
        return Mesh(devices, (TENSOR, GROUP), axis_types=(AxisType.Auto, AxisType.Auto))
