"""Which logical axis each dimension of an array is, and which axes of a mesh it is spread over. Free of jax."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from mcjax.cost.model_shape import ModelShape
from mcjax.cost.parameters import Parameter, parameters
from mcjax.kernels.axes import DATA, EXPERT, GROUP, TENSOR

MeshAxis: TypeAlias = str


@dataclass(frozen=True, slots=True)
class Rules:
    """Which axes of a mesh (`kernels.axes`) each logical axis is spread over, the first of them outermost."""

    vocab: tuple[MeshAxis, ...] = (TENSOR, GROUP)
    heads: tuple[MeshAxis, ...] = (TENSOR, GROUP)
    kv_heads: tuple[MeshAxis, ...] = (TENSOR,)
    d_ff: tuple[MeshAxis, ...] = (TENSOR, GROUP)
    experts: tuple[MeshAxis, ...] = (EXPERT,)
    rows: tuple[MeshAxis, ...] = (DATA,)

    def cut(
        self, axes: Sequence[str | None], sizes: Sequence[int], mesh: Mapping[MeshAxis, int]
    ) -> tuple[tuple[MeshAxis, ...] | None, ...]:
        """Of each dimension, what of `mesh` (lengths of its axes) it is spread over; None: whole on every device.

        What does not go evenly, such as an odd vocabulary, lies on every device.
        """
        wanted: list[tuple[MeshAxis, ...] | None] = [None if axis is None else getattr(self, axis) for axis in axes]
        return tuple(
            names if names and size % math.prod(mesh[name] for name in names) == 0 else None
            for names, size in zip(wanted, sizes, strict=True)
        )


PAGES: dict[str, tuple[str | None, ...]] = {
    "tokens_first": (None, None, None, None, "kv_heads", None),  # [P, L, C, page, Hkv, D]
    "heads_first": (None, None, None, "kv_heads", None, None),  # [P, L, C, Hkv, page, D]
}
"""By layout (`kernels.choice.Layout`). Canonical blocks lie as pages whose tokens come first."""

TABLE = Parameter((1, 2, 1), (None, None, None))
"""Rotary tables, which are on every device."""


def axes_of(path: Sequence[Any], shape: ModelShape) -> Parameter:
    """What is declared of the parameter at a path of the model's state."""
    name = name_of(path)
    if name in ("rotary", "local_rotary"):
        return TABLE
    return parameters(shape)[name]


def name_of(path: Sequence[Any]) -> str:
    """The parameter that lies at a path of the model's state."""
    return ".".join(str(key.key) for key in path if hasattr(key, "key"))  # it ends in an attribute: the array
