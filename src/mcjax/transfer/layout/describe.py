"""What a block's bytes are: the layout that travels with every transfer, and is compared before anything moves.

A block of a group holds one vector of `width` numbers for each of its layers, each of keys and values, each token and
each head. `order` says how they lie (today's pages: `[layer, kv, token, head, width]`); a shard holds those of its
layers and heads alone. With an encoding of one byte a number (`kvpool/encodings`) a block is the scales of its vectors,
four bytes each, then their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import LayoutMismatch
from mcjax.transfer.layout.numbers import DTYPE_BYTES

Kind: TypeAlias = Literal["full", "window", "latent", "state"]
KINDS = ("full", "window", "latent", "state")
ORDER = ("layer", "kv", "token", "head")
"""As this engine's pages lie, outermost first; the numbers of a vector are always innermost."""
SCALE_BYTES = 4
ENCODINGS = ("none", "int8", "fp8")
"""Whose bytes are known here: numbers as computed, or one byte each and a scale a vector."""
VERSION = 1
_LARGEST = 1 << 24
"""Of any number in a layout: products of them stay far inside 64 bits, whatever a peer writes."""
_MOST_PARTS = 1 << 26
"""Layers times heads times ranks: several times what the largest model on a thousand ranks has."""


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds of a group: layers and heads `first .. last` (exclusive), of those of the group."""

    first_layer: int
    last_layer: int
    first_head: int
    last_head: int

    @property
    def layers(self) -> int:
        return self.last_layer - self.first_layer

    @property
    def heads(self) -> int:
        return self.last_head - self.first_head

    def holds(self, layer: int, head: int) -> bool:
        return self.first_layer <= layer < self.last_layer and self.first_head <= head < self.last_head


def tensor_shards(
    layers: int, kv_heads: int, tensor: int, *, kind: Kind = "full", whole: bool = False, stages: int = 1
) -> tuple[Shard, ...]:
    """The shards of `stages` pipeline stages of `tensor` ranks each, stage by stage.

    Heads are cut evenly; where there are fewer than ranks, neighbouring ranks hold the same one, or with `whole` every
    rank holds all of them, as this engine's meshes do (`backends/jax/placement.py`). A latent is on every rank.
    Raises `LayoutMismatch` for heads or layers that do not divide.
    """
    if stages < 1 or layers % stages:
        raise LayoutMismatch(f"{layers} layers do not go into {stages} equal stages")
    if tensor < 1 or (kind != "latent" and kv_heads % tensor and tensor % kv_heads):
        raise LayoutMismatch(f"{kv_heads} key heads do not go into {tensor} parts, nor {tensor} ranks into the heads")
    depth = layers // stages
    shards: list[Shard] = []
    for stage in range(stages):
        for rank in range(tensor):
            if kind == "latent" or (whole and kv_heads < tensor):
                first, last = 0, kv_heads
            elif kv_heads < tensor:
                first = rank // (tensor // kv_heads)
                last = first + 1
            else:
                first, last = rank * (kv_heads // tensor), (rank + 1) * (kv_heads // tensor)
            shards.append(Shard(stage * depth, (stage + 1) * depth, first, last))
    return tuple(shards)


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One KV group. `layers` by name or number, in the order in which they lie; `shards` by rank.

    `latent` has one head of `width` numbers, the last `rope_width` of which carry the position, and no values.
    `window` is of use for the last `window_tokens` tokens. `state` has one snapshot a block, as of the block's end.
    """

    name: str
    kind: Kind
    layers: tuple[str, ...]
    kv_heads: int
    width: int
    block_tokens: int
    dtype: str
    shards: tuple[Shard, ...]
    rope_width: int = 0
    window_tokens: int = 0
    order: tuple[str, ...] = ORDER

    def __post_init__(self) -> None:
        """Raises `LayoutMismatch` for what is no layout."""
        if problem := _problem(self):
            raise LayoutMismatch(f"KV group {self.name!r}: {problem}")

    @property
    def keys_and_values(self) -> int:
        """2 where keys and values are held apart."""
        return 2 if self.kind in ("full", "window") else 1

    @property
    def rows(self) -> int:
        """Tokens of a block that have numbers of their own: one, a snapshot, in a `state`."""
        return 1 if self.kind == "state" else self.block_tokens

    @property
    def number_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def vectors(self, rank: int) -> int:
        """Vectors of a block, as far as `rank` holds it."""
        shard = self.shards[rank]
        return shard.layers * shard.heads * self.keys_and_values * self.rows

    def strides(self, rank: int) -> dict[str, int]:
        """Vectors from one to the next of each axis, in a block of `rank`."""
        shard = self.shards[rank]
        sizes = {"layer": shard.layers, "kv": self.keys_and_values, "token": self.rows, "head": shard.heads}
        strides: dict[str, int] = {}
        step = 1
        for axis in reversed(self.order):
            strides[axis] = step
            step *= sizes[axis]
        return strides

    def planes(self, rank: int, encoding: str) -> tuple[tuple[int, int], ...]:
        """`(first byte, bytes a vector)` of each part of a block of `rank`: its numbers, or scales and numbers."""
        if encoding == "none":
            return ((0, self.width * self.number_bytes),)
        return (0, SCALE_BYTES), (SCALE_BYTES * self.vectors(rank), self.width)

    def block_bytes(self, rank: int, encoding: str = "none") -> int:
        return self.vectors(rank) * sum(nbytes for _, nbytes in self.planes(rank, encoding))

    def holders(self, layer: int, head: int) -> list[int]:
        """Ranks that hold a head of a layer, ascending."""
        return [rank for rank, shard in enumerate(self.shards) if shard.holds(layer, head)]

    def owner(self, layer: int, head: int) -> int:
        """The rank that writes it where one copy is wanted: the lowest that holds it."""
        return self.holders(layer, head)[0]


def _problem(group: GroupLayout) -> str:
    if group.kind not in KINDS:
        return f"kind {group.kind!r} is none of {', '.join(KINDS)}"
    if group.dtype not in DTYPE_BYTES:
        return f"dtype {group.dtype!r} is none of {', '.join(DTYPE_BYTES)}"
    if sorted(group.order) != sorted(ORDER):
        return f"order {group.order} is no permutation of {ORDER}"
    for name in ("kv_heads", "width", "block_tokens"):
        if not 1 <= getattr(group, name) <= _LARGEST:
            return f"{name}={getattr(group, name)} is not from 1 to {_LARGEST}"
    if not 1 <= len(group.layers) <= 1 << 16 or len(dict.fromkeys(group.layers)) != len(group.layers):
        return "its layers are none, too many, or not distinct"
    if group.kind == "latent" and not (group.kv_heads == 1 and 0 <= group.rope_width < group.width):
        return "a latent has one head, wider than its rope part"
    if group.kind != "latent" and group.rope_width:
        return "only a latent has a rope part"
    if (group.kind == "window") != (group.window_tokens > 0) or group.window_tokens > _LARGEST:
        return f"window_tokens={group.window_tokens} does not go with kind {group.kind}"
    if not 1 <= len(group.shards) * len(group.layers) * group.kv_heads <= _MOST_PARTS:
        return f"{len(group.shards)} shards of {len(group.layers)} layers and {group.kv_heads} heads"
    there = np.zeros((len(group.layers), group.kv_heads), bool)
    for rank, shard in enumerate(group.shards):
        if not (0 <= shard.first_layer < shard.last_layer <= len(group.layers)):
            return f"rank {rank} holds layers {shard.first_layer}..{shard.last_layer} of {len(group.layers)}"
        if not (0 <= shard.first_head < shard.last_head <= group.kv_heads):
            return f"rank {rank} holds heads {shard.first_head}..{shard.last_head} of {group.kv_heads}"
        there[shard.first_layer : shard.last_layer, shard.first_head : shard.last_head] = True
    if not there.all():
        layer, head = np.argwhere(~there)[0].tolist()
        return f"no rank holds head {head} of layer {group.layers[layer]}"
    return ""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the blocks of one model lie in one memory, or over the memories of one instance's ranks.

    `fingerprint` names the weights: what is not of the same ones is never converted. `encoding`: how blocks rest.
    """

    fingerprint: str
    groups: tuple[GroupLayout, ...]
    encoding: str = "none"

    def __post_init__(self) -> None:
        """Raises `LayoutMismatch` for what is no layout."""
        names = [group.name for group in self.groups]
        if not names or len(dict.fromkeys(names)) != len(names):
            raise LayoutMismatch("a layout has groups, each with a name of its own")
        if self.encoding not in ENCODINGS:
            raise LayoutMismatch(f"encoding {self.encoding!r} is none of {', '.join(ENCODINGS)}")
        ranks = [len(group.shards) for group in self.groups]
        if min(ranks) != max(ranks):
            raise LayoutMismatch(f"its groups lie on {ranks} ranks")

    @property
    def ranks(self) -> int:
        return len(self.groups[0].shards)

    @property
    def boundary_tokens(self) -> int:
        """Tokens between two places where every group has a whole block: where a match may end."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    def group(self, name: str) -> GroupLayout:
        return next(group for group in self.groups if group.name == name)

    def describe(self) -> str:
        """For messages, in a line."""
        groups = "; ".join(
            f"{group.name} ({group.kind}, {len(group.layers)} layers, {group.kv_heads} heads of {group.width} "
            f"{group.dtype}, {group.block_tokens} tokens a block)"
            for group in self.groups
        )
        return f"model {self.fingerprint[:12]}, {self.ranks} ranks, encoding {self.encoding}: {groups}"

    def to_values(self) -> dict[str, Any]:
        """Plain values, for a region's descriptor or a message."""
        return {"version": VERSION, **cast("dict[str, Any]", _plain(asdict(self)))}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Layout:
        """Raises `LayoutMismatch` for anything that `to_values` does not write, of another version too."""
        if values.get("version") != VERSION:
            raise LayoutMismatch(f"layout version {values.get('version')!r}, not {VERSION}")
        rest = {name: value for name, value in values.items() if name != "version"}
        rest = _fields(cls, rest)
        groups: list[GroupLayout] = []
        for entry in _list(rest["groups"], dict):
            group = _fields(GroupLayout, entry)
            group["layers"] = tuple(_list(group["layers"], str))
            group["order"] = tuple(_list(group["order"], str))
            group["shards"] = tuple(Shard(**_fields(Shard, shard)) for shard in _list(group["shards"], dict))
            groups.append(GroupLayout(**group))
        return cls(rest["fingerprint"], tuple(groups), rest["encoding"])

    def differences(self, other: Layout) -> list[str]:
        """What keeps blocks of the one from being read as blocks of the other as they are, in words."""
        mine, others = _meaning(self), _meaning(other)
        names = dict.fromkeys((*mine, *others))
        return [
            f"{name} is {mine.get(name, 'missing')}, not {others.get(name, 'missing')}"
            for name in names
            if mine.get(name) != others.get(name)
        ]


def whole(
    fingerprint: str,
    layers: int,
    kv_heads: int,
    head_dim: int,
    block_tokens: int,
    dtype: str,
    encoding: str = "none",
    rope_width: int | None = None,
) -> Layout:
    """This engine's host blocks: one group, every layer and head in one place; with a `rope_width`, of latents.

    Layers with a window lie among the others and hold every token, as they do: their bytes are those of full attention.
    """
    names = tuple(str(layer) for layer in range(layers))
    kind: Kind = "full" if rope_width is None else "latent"
    shards = tensor_shards(layers, kv_heads, 1, kind=kind)
    group = GroupLayout(kind, kind, names, kv_heads, head_dim, block_tokens, dtype, shards, rope_width or 0)
    return Layout(fingerprint, (group,), encoding)


def ranks_of(group: GroupLayout) -> NDArray[np.int64]:
    """`[layers, heads]`: the rank that owns each head of each layer."""
    owners = np.full((len(group.layers), group.kv_heads), -1, np.int64)
    for rank in reversed(range(len(group.shards))):
        shard = group.shards[rank]
        owners[shard.first_layer : shard.last_layer, shard.first_head : shard.last_head] = rank
    return owners


def _meaning(layout: Layout) -> dict[str, object]:
    meaning: dict[str, object] = {"model": layout.fingerprint, "encoding": layout.encoding, "ranks": layout.ranks}
    for group in layout.groups:
        for field in fields(GroupLayout):
            if field.name != "name":
                meaning[f"{field.name} of group {group.name}"] = getattr(group, field.name)
    return meaning


def _plain(value: object) -> object:
    """Tuples as lists, all the way down: what JSON gives back."""
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in cast("dict[str, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in cast("Sequence[object]", value)]
    return value


def _fields(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a dataclass's fields: all of them, no others, each of its type."""
    wanted = {field.name: str(field.type) for field in fields(kind)}
    if set(values) != set(wanted):
        raise LayoutMismatch(f"not a layout: {kind.__name__} has {sorted(values)}, not {sorted(wanted)}")
    for name, annotation in wanted.items():
        expected = {"int": int, "str": str, "Kind": str}.get(annotation)
        if expected is not None and type(values[name]) is not expected:
            raise LayoutMismatch(f"not a layout: {name} is {type(values[name]).__name__}")
    return dict(values)


def _list(value: object, kind: type[Any]) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise LayoutMismatch(f"not a layout: {type(value).__name__} where a list is due")
    entries = list(cast("Sequence[object]", value))
    if len(entries) > 1 << 16 or any(type(entry) is not kind for entry in entries):
        raise LayoutMismatch("not a layout: a list is too long, or of other things")
    return entries
