"""The head of a GGUF file: its metadata, and where its tensors lie. Free of jax, and of the `gguf` package.

That package's own reader takes seconds over a vocabulary, and does not end on some damaged files: here every count is
held against the bytes that are left. Little-endian files of version 2 and 3. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
"""NumPy's name of each type of metadata that is a number or a truth value."""
STRING, ARRAY = 8, 9
MOST_DIMENSIONS = 8
ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """`shape` with rows first; `offset` counts from the start of the file; `kind` is the number of a GGML type."""

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    """What the head of a file says."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorPlace]


def read_header(data: memoryview) -> Header:
    """The head of a file. Raises `ValueError` that says what is wrong with it."""
    reader = _Reader(data)
    if bytes(data[:4]) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    reader.at = 4
    version = reader.number("<I")
    if version not in (2, 3):
        raise ValueError(f"version {version}, little-endian, is not known")
    tensors, entries = reader.number("<Q"), reader.number("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(reader.at_least(entries, 13)):
        key = reader.text()
        if key in metadata:
            raise ValueError(f"{key} is there twice")
        metadata[key] = reader.value(reader.number("<I"))
    places = dict(reader.tensor() for _ in range(reader.at_least(tensors, 32)))
    if len(places) != tensors:
        raise ValueError("a tensor is there twice")
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= 2**20:
        raise ValueError(f"an alignment of {alignment}")
    start = -(-reader.at // alignment) * alignment
    return Header(
        metadata, {name: TensorPlace(found.shape, found.kind, start + found.offset) for name, found in places.items()}
    )


class _Reader:
    def __init__(self, data: memoryview):
        self._data = data
        self.at = 0

    def at_least(self, count: int, size: int) -> int:
        """`count`, if so many things of `size` bytes or more may still come."""
        if count * size > len(self._data) - self.at:
            raise ValueError(f"{count} entries at byte {self.at}, but the file ends at {len(self._data)}")
        return count

    def number(self, layout: str) -> int:
        self.at_least(1, struct.calcsize(layout))
        (value,) = struct.unpack_from(layout, self._data, self.at)
        self.at += struct.calcsize(layout)
        return value

    def text(self) -> str:
        length = self.at_least(self.number("<Q"), 1)
        self.at += length
        return str(self._data[self.at - length : self.at], "utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self._numbers(kind, 1)[0]
        kind, count = self.number("<I"), self.number("<Q")
        if kind == STRING:
            return [self.text() for _ in range(self.at_least(count, 8))]
        return self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> list[Any]:
        if kind not in NUMBERS:
            raise ValueError(f"a value of the unknown type {kind} at byte {self.at}")
        dtype = np.dtype(NUMBERS[kind])
        start = self.at
        self.at += self.at_least(count, dtype.itemsize) * dtype.itemsize
        return np.frombuffer(self._data[start : self.at], dtype).tolist()

    def tensor(self) -> tuple[str, TensorPlace]:
        name, dimensions = self.text(), self.number("<I")
        if not 0 < dimensions <= MOST_DIMENSIONS:
            raise ValueError(f"{name} has {dimensions} dimensions")
        sizes = [self.number("<Q") for _ in range(dimensions)]
        return name, TensorPlace(tuple(reversed(sizes)), self.number("<I"), self.number("<Q"))
