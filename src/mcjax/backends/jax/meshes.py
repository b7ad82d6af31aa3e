"""How many devices an instance of each role computes on. Pure: what lies where is `placement.py`'s business."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError
from mcjax.types import Role

KEY = "backend.mesh"
_FORM = "write {prefill: 2, decode: 1, mixed: 1}, {prefill: {tensor: 2}}, or one number for all"


@dataclass(frozen=True, slots=True)
class Meshes:
    """Devices of one instance, by its role: the size of the axis `tensor`."""

    prefill: int = 1
    decode: int = 1
    mixed: int = 1

    def of(self, role: Role) -> int:
        """Devices of an instance of this role."""
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.MIXED: self.mixed}[role]

    def sizes(self, roles: Sequence[Role]) -> tuple[int, ...]:
        """Devices of each instance."""
        return tuple(self.of(role) for role in roles)


def read_meshes(value: object) -> Meshes:
    """`backend.mesh` of a config. Raises `ConfigError` for what cannot be read."""
    if value is None:
        return Meshes()
    if not isinstance(value, Mapping):
        size = _size(KEY, value)
        return Meshes(size, size, size)
    entries = cast("Mapping[object, object]", value)
    if "tensor" in entries:
        return read_meshes(_tensor(KEY, entries))
    sizes: dict[str, int] = {}
    for role, entry in entries.items():
        if role not in list(Role):
            raise ConfigError(f"{KEY}.{role}", entry, f"is no role; {_FORM}", [str(role) for role in Role])
        key = f"{KEY}.{role}"
        of_role = _tensor(key, cast("Mapping[object, object]", entry)) if isinstance(entry, Mapping) else entry
        sizes[str(role)] = _size(key, of_role)
    return Meshes(**sizes)


def _tensor(key: str, axes: Mapping[object, object]) -> object:
    for axis in axes:
        if axis != "tensor":
            raise ConfigError(f"{key}.{axis}", axes[axis], f"is no axis; {_FORM}", ["tensor"])
    return axes["tensor"]


def _size(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(key, value, f"must be a whole number, 1 or more; {_FORM}")
    return value


def check_divides(model: ModelShape, size: int) -> None:
    """Raise `ConfigError` unless a model can be spread over `size` devices; names the sizes that work."""
    if not divides(model, size):
        keys = "latents" if model.latent else f"{model.kv_heads} key heads"
        experts = f", {model.experts} experts of width {_expert_width(model)}" if model.experts else ""
        problem = f"{model.heads} query heads, {keys}, d_ff={model.d_ff}{experts} do not go into {size} parts"
        raise ConfigError(KEY, size, problem, [found for found in range(1, model.heads + 1) if divides(model, found)])


def divides(model: ModelShape, size: int) -> bool:
    """Query heads and feed-forward widths are cut; so are key heads, or each device holds all of them when there are
    fewer than devices, as with latents. Experts lie on devices whole, or are cut as well where they do not go evenly.
    """
    heads = model.cache_heads
    whole_heads = heads % size == 0 or (size > heads and size % heads == 0)
    widths = [model.d_ff] if model.dense_layers or not model.experts else []
    if model.experts:
        widths.append(model.experts if model.experts % size == 0 else _expert_width(model))
        widths.append(model.shared_experts * _expert_width(model))
    return model.heads % size == 0 and whole_heads and all(width % size == 0 for width in widths)


def _expert_width(model: ModelShape) -> int:
    return model.expert_d_ff or model.d_ff


def allot(sizes: Sequence[int], devices: int) -> list[tuple[int, ...]]:
    """Device numbers of each instance: groups of their own, in order. Instances of one device each may share.

    Raises `ConfigError` if there are too few devices: two programs that span devices must not meet on one.
    """
    if sum(sizes) <= devices:
        firsts = [sum(sizes[:index]) for index in range(len(sizes))]
        return [tuple(range(first, first + size)) for first, size in zip(firsts, sizes, strict=True)]
    if all(size == 1 for size in sizes):
        return [(index % devices,) for index in range(len(sizes))]
    wanted = " + ".join(str(size) for size in sizes)
    problem = (
        f"needs {sum(sizes)} devices, and there are {devices} (of CPUs, as many as the process's first run asked for)"
    )
    raise ConfigError(KEY, wanted, problem)
