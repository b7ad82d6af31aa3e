"""KV numbers of one dtype as those of another: rounded to the nearest, ties to even, as hardware does."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import Unencodable

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Those that blocks are computed in."""

_EXACT = (("bfloat16", "float32"), ("float16", "float32"))
"""Every number of the first is one of the second."""


def lossy(source: str, target: str) -> bool:
    """Whether what comes out may differ from what went in."""
    return source != target and (source, target) not in _EXACT


def converted(packed: NDArray[np.uint8], source: str, target: str) -> NDArray[np.uint8]:
    """The same numbers in another dtype, as bytes. NaN stays NaN (pages begin as NaN), infinity infinity.

    Raises `Unencodable` for a finite number that is too large for `target`.
    """
    if source == target:
        return packed
    values = _widened(packed, source)
    if target == "float32":
        return values.view(np.uint8)
    if target == "float16":
        with np.errstate(over="ignore", invalid="ignore"):
            narrow = values.astype(np.float16)
        _refuse_overflow(target, np.isfinite(values) & np.isinf(narrow))
        return narrow.view(np.uint8)
    words = values.view(np.uint32)
    with np.errstate(over="ignore"):
        rounded = ((words + (np.uint32(0x7FFF) + ((words >> 16) & np.uint32(1)))) >> 16).astype(np.uint16)
    rounded[np.isnan(values)] = 0x7FC0
    _refuse_overflow(target, np.isfinite(values) & ((rounded & 0x7FFF) == 0x7F80))
    return rounded.view(np.uint8)


def _widened(packed: NDArray[np.uint8], source: str) -> NDArray[np.float32]:
    if source == "float32":
        return packed.view(np.float32)
    if source == "float16":
        return packed.view(np.float16).astype(np.float32)
    return (packed.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _refuse_overflow(target: str, overflown: NDArray[np.bool_]) -> None:
    if overflown.any():
        raise Unencodable(f"{int(overflown.sum())} numbers are too large for {target}")
