"""Where the arrays of one instance lie: on a device, or spread over a few along the axis `tensor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from mcjax.models.llama import LlamaConfig
from mcjax.models.sharding import PAGES, axes_of

Device: TypeAlias = Any
"""A `jax.Device`, which type checkers take for a variable."""

TENSOR = "tensor"


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
        return self._spread(())

    def weight(self, path: Sequence[Any], config: LlamaConfig) -> jax.sharding.Sharding:
        """Where a parameter lies, by its path in the model."""
        return self._cut(axes_of(path), config)

    def pages(self, config: LlamaConfig) -> jax.sharding.Sharding:
        """Where KV pages lie."""
        return self._cut(PAGES, config)

    def _cut(self, axes: Sequence[str | None], config: LlamaConfig) -> jax.sharding.Sharding:
        sizes = {"heads": config.heads, "kv_heads": config.kv_heads, "d_ff": config.d_ff, "vocab": config.vocab}
        # What does not go evenly lies on every device: key heads fewer than devices, an odd vocabulary.
        return self._spread([axis if axis in sizes and sizes[axis] % self.size == 0 else None for axis in axes])

    def _spread(self, axes: Sequence[str | None]) -> jax.sharding.Sharding:
        if self.size == 1:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self._mesh, PartitionSpec(*(None if axis is None else TENSOR for axis in axes)))

    @cached_property
    def _mesh(self) -> Mesh:
        # Auto: the compiler finds the way from how weights and pages lie; explicit axes would bind every operation.
        return Mesh(np.array(self.devices), (TENSOR,), axis_types=(AxisType.Auto,))
