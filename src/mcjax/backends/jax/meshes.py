"""How many devices an instance of each role computes on, along which axes. Pure: what lies where is `placement.py`'s
business."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError
from mcjax.types import Role

KEY = "backend.mesh"
_FORM = "write {prefill: 2, decode: 1, mixed: 1}, {prefill: {tensor: 2, expert: 2}}, or one number for all"
_AXES = ("tensor", "expert")


@dataclass(frozen=True, slots=True, order=True)
class MeshAxes:
    """Devices of one instance: `tensor` that share each layer, times `expert` that share its experts."""

    tensor: int = 1
    expert: int = 1

    @property
    def size(self) -> int:
        return self.tensor * self.expert


@dataclass(frozen=True, slots=True)
class Meshes:
    """The mesh of one instance, by its role."""

    prefill: MeshAxes = MeshAxes()
    decode: MeshAxes = MeshAxes()
    mixed: MeshAxes = MeshAxes()

    def of(self, role: Role) -> MeshAxes:
        """That of an instance of this role."""
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.MIXED: self.mixed}[role]

    def each(self, roles: Sequence[Role]) -> tuple[MeshAxes, ...]:
        """That of each instance."""
        return tuple(self.of(role) for role in roles)


def read_meshes(value: object) -> Meshes:
    """`backend.mesh` of a config. Raises `ConfigError` for what cannot be read."""
    if value is None:
        return Meshes()
    if not isinstance(value, Mapping):
        axes = _axes(KEY, value)
        return Meshes(axes, axes, axes)
    entries = cast("Mapping[object, object]", value)
    if any(axis in entries for axis in _AXES):
        axes = _axes(KEY, entries)
        return Meshes(axes, axes, axes)
    found: dict[str, MeshAxes] = {}
    for role, entry in entries.items():
        if role not in list(Role):
            raise ConfigError(f"{KEY}.{role}", entry, f"is no role; {_FORM}", [str(role) for role in Role])
        found[str(role)] = _axes(f"{KEY}.{role}", entry)
    return Meshes(**found)


def _axes(key: str, value: object) -> MeshAxes:
    """One instance's: a number is that of `tensor`."""
    if not isinstance(value, Mapping):
        return MeshAxes(_size(key, value))
    entries = cast("Mapping[object, object]", value)
    for axis, size in entries.items():
        if axis == "data":
            problem = "an instance does not spread rows over devices; more instances (cluster=4m) are replicas"
            raise ConfigError(f"{key}.data", size, problem, _AXES)
        if axis not in _AXES:
            raise ConfigError(f"{key}.{axis}", size, f"is no axis; {_FORM}", _AXES)
    return MeshAxes(**{str(axis): _size(f"{key}.{axis}", size) for axis, size in entries.items()})


def _size(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(key, value, f"must be a whole number, 1 or more; {_FORM}")
    return value


def check_divides(model: ModelShape, axes: MeshAxes) -> None:
    """Raise `ConfigError` unless a model can be spread over these axes; names the sizes that work."""
    if not divides(model, axes.tensor):
        keys = "latents" if model.latent else f"{model.kv_heads} key heads"
        experts = f", experts of width {_expert_width(model)}" if model.experts else ""
        problem = f"{model.heads} query heads, {keys}, d_ff={model.d_ff}{experts} do not go into {axes.tensor} parts"
        fit = [size for size in range(1, model.heads + 1) if divides(model, size)]
        raise ConfigError(KEY, axes.tensor, problem, fit)
    if axes.expert > 1 and (not model.experts or model.experts % axes.expert):
        fit = [size for size in range(1, model.experts + 1) if model.experts % size == 0] or [1]
        problem = f"{model.experts} experts do not go into {axes.expert} parts"
        raise ConfigError(f"{KEY}.expert", axes.expert, problem, fit)


def divides(model: ModelShape, size: int) -> bool:
    """Query heads and feed-forward widths are cut; so are key heads, or each device holds all of them when there are
    fewer than devices, as with latents. Experts are cut as well, beside what the axis `expert` does.
    """
    heads = model.cache_heads
    whole_heads = heads % size == 0 or (size > heads and size % heads == 0)
    widths = [model.d_ff] if model.dense_layers or not model.experts else []
    if model.experts:
        widths.append(_expert_width(model))
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
