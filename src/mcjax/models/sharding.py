"""Which logical axis each dimension of an array is. Free of jax: what is spread over devices, the backend says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mcjax.cost.model_shape import ModelShape
from mcjax.cost.parameters import Parameter, parameters

PAGES: dict[str, tuple[str | None, ...]] = {
    "tokens_first": (None, None, None, None, "kv_heads", None),  # [P, L, C, page, Hkv, D]
    "heads_first": (None, None, None, "kv_heads", None, None),  # [P, L, C, Hkv, page, D]
}
"""By layout (`kernels.choice.Layout`). Canonical blocks lie as pages whose tokens come first."""

TABLE = Parameter((1, 2, 1), (None, None, None))
"""Rotary tables, which are on every device."""


def axes_of(path: Sequence[Any], shape: ModelShape) -> Parameter:
    """What is declared of the parameter at a path of the model's state. Scales of a quantised one are cut as it is."""
    name = name_of(path)
    if name in ("rotary", "local_rotary"):
        return TABLE
    declared = parameters(shape)[name]
    if getattr(path[-1], "name", "") != "scales":
        return declared
    dims = enumerate(zip(declared.shape, declared.axes, strict=True))
    kept = [(1, None) if at in declared.summed else both for at, both in dims]
    return Parameter(tuple(size for size, _ in kept), tuple(axis for _, axis in kept))


def name_of(path: Sequence[Any]) -> str:
    """The parameter that lies at a path of the model's state."""
    return ".".join(str(key.key) for key in path if hasattr(key, "key"))  # it ends in an attribute: the array
