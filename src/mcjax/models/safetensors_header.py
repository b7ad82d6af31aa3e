"""The head of a safetensors file: which tensor lies where. Free of jax, and of what else reads such files.

A file is the header's length (8 bytes, little endian), the header (JSON) and the tensors' bytes, back to back
(https://huggingface.co/docs/safetensors). Every number in the header is held against the bytes that there are.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, TypeGuard

LONGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""
WIDTHS = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8,
}  # fmt: skip
"""Bytes of a number, by dtype. Those of less than a byte (`F4`, `F6_E2M3`) are read by nobody here."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies in its file, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(data: memoryview) -> dict[str, TensorPlace]:
    """The tensors of a file whose bytes are `data`, by name. Raises `ValueError`, which says what is wrong with it."""
    if len(data) < 8:
        raise ValueError(f"it has {len(data)} bytes")
    length = int.from_bytes(data[:8], "little")
    start = 8 + length
    if length > LONGEST_HEADER:
        raise ValueError(f"its header would have {length} bytes")
    if start > len(data):
        raise ValueError(f"its header would end at byte {start} of {len(data)}")
    places: dict[str, TensorPlace] = {}
    for name, said in _entries(bytes(data[8:start])):
        if name == "__metadata__":
            continue
        if name in places:
            raise ValueError(f"its header has the tensor {name} twice")
        places[name] = _place(name, said, start)
    end = start
    for name, place in sorted(places.items(), key=lambda item: (item[1].begin, item[1].end)):
        if place.begin != end:
            raise ValueError(f"{name} begins at byte {place.begin}, and what lies before it ends at {end}")
        end = place.end
    if end != len(data):
        raise ValueError(f"its tensors end at byte {end}, and it has {len(data)}")
    return places


def _entries(header: bytes) -> list[tuple[str, Any]]:
    try:
        # Pairs, since a JSON object may have a key twice. Deep nesting is a RecursionError.
        pairs = json.loads(header.decode("utf-8"), object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"its header is no JSON: {str(problem)[:100]}") from None
    if not isinstance(pairs, _Pairs):
        raise ValueError("its header is no JSON object")
    return pairs


class _Pairs(list[tuple[str, Any]]):
    """A JSON object."""


def _place(name: str, said: Any, start: int) -> TensorPlace:
    if not isinstance(said, _Pairs):
        raise ValueError(f"{name[:100]} is not described by an object")
    fields = dict(said)
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or not _wholes(shape) or not _wholes(offsets) or len(offsets) != 2:
        raise ValueError(f"{name[:100]} lacks a dtype, a shape, or two data_offsets")
    place = TensorPlace(dtype, tuple(shape), start + offsets[0], start + offsets[1])
    size = place.end - place.begin
    if size < 0:
        raise ValueError(f"{name[:100]} ends before it begins")
    if dtype in WIDTHS and math.prod(shape) * WIDTHS[dtype] != size:
        raise ValueError(f"{name[:100]}, {list(shape)} of {dtype}, has {size} bytes")
    return place


def _wholes(values: Any) -> TypeGuard[list[int]]:
    """Whether it is a list of whole numbers that a file can have."""
    return type(values) is list and all(type(value) is int and 0 <= value < 2**63 for value in values)
