"""What a parameter is put together from: models keep products side by side that checkpoints keep apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mcjax.cost.parameters import Parameter


@dataclass(frozen=True, slots=True)
class Piece:
    """A matrix or vector as papers and checkpoints speak of it: inputs first, then heads and their width."""

    name: str
    shape: tuple[int, ...]
    fan_in: int
    init: str


def pieces(name: str, parameter: Parameter) -> tuple[Piece, ...]:
    """Those of the parameter `name`, in the order in which `joined` wants them; itself, if it is not joined."""
    stem, _, last = name.rpartition(".")
    whole = Piece(name, parameter.shape, parameter.fan_in, parameter.init)
    if last in ("mix", "mix_bias"):
        *inputs, kv_heads, mixed, dim = parameter.shape
        heads = {"query": kv_heads * (mixed - 2), "key": kv_heads, "value": kv_heads}
        suffix = last.removeprefix("mix")
        return tuple(
            replace(whole, name=f"{stem}.{part}{suffix}", shape=(*inputs, count, dim)) for part, count in heads.items()
        )
    if last == "gate_up":
        *batch, _, width = parameter.shape
        return tuple(replace(whole, name=f"{stem}.{part}", shape=(*batch, width)) for part in ("gate", "up"))
    return (whole,)


Window: TypeAlias = tuple[slice, ...]
"""A part of an array: a start and a stop for each dimension."""


def whole(shape: Sequence[int]) -> Window:
    return tuple(slice(0, size) for size in shape)


def extent(window: Window) -> tuple[int, ...]:
    """The shape of what lies in a window."""
    return tuple(part.stop - part.start for part in window)


def windows(name: str, parameter: Parameter, window: Window) -> tuple[Window, ...]:
    """Of each piece of the parameter `name`, what a window of the parameter holds. Joined dimensions stay whole."""
    last = name.rpartition(".")[2]
    if last in ("mix", "mix_bias"):
        *inputs, heads, _, dim = window
        group = parameter.shape[-2] - 2
        query = slice(heads.start * group, heads.stop * group)
        return ((*inputs, query, dim), (*inputs, heads, dim), (*inputs, heads, dim))
    if last == "gate_up":
        *batch, _, width = window
        return ((*batch, width),) * 2
    return (window,)


def parted(name: str, array: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Views of the parameter `name`, or of a window of it, into which its pieces are written.

    Those of joined heads have a dimension more: `[..., Hkv, G, D]` for queries, and one for keys and for values.
    """
    last = name.rpartition(".")[2]
    if last in ("mix", "mix_bias"):
        return array[..., :-2, :], array[..., -2:-1, :], array[..., -1:, :]
    if last == "gate_up":
        return array[..., 0, :], array[..., 1, :]
    return (array,)


def joined(name: str, parameter: Parameter, parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The parameter, of its declared shape."""
    last = name.rpartition(".")[2]
    if last in ("mix", "mix_bias"):
        *inputs, kv_heads, _, dim = parameter.shape
        query, key, value = (part.reshape(*inputs, kv_heads, -1, dim) for part in parts)
        return np.concatenate([query, key, value], axis=-2)
    if last == "gate_up":
        return np.stack(parts, axis=-2)
    (whole,) = parts
    return whole
