"""What a parameter is put together from: models keep products side by side that checkpoints keep apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

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
