"""Safetensors files, written one tensor at a time: the head is known before any number is. Free of jax."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mcjax.models.safetensors_directory import INDEX, SINGLE

DTYPES = {"float32": "F32", "bfloat16": "BF16"}
"""What the format calls them."""


@dataclass(frozen=True, slots=True)
class File:
    """One file of a directory: its tensors' shapes by name, in the order in which they lie in it."""

    name: str
    tensors: Mapping[str, tuple[int, ...]]
    dtype: str

    def head(self) -> bytes:
        """The length of the header, and the header, which ends on a multiple of eight bytes."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without
        end = 0
        for name, shape in self.tensors.items():
            begin, end = end, end + self._bytes(shape)
            entries[name] = {"dtype": DTYPES[self.dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def size(self) -> int:
        """Of all tensors, in bytes."""
        return sum(self._bytes(shape) for shape in self.tensors.values())

    def _bytes(self, shape: Sequence[int]) -> int:
        return math.prod(shape) * (4 if self.dtype == "float32" else 2)


def files(tensors: Mapping[str, tuple[int, ...]], dtype: str, most_bytes: int) -> list[File]:
    """Which tensors go to which file, in their order: none is larger than `most_bytes`, unless one tensor is."""
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    room = most_bytes
    for name, shape in tensors.items():
        size = math.prod(shape) * (4 if dtype == "float32" else 2)
        if groups[-1] and size > room:
            groups.append({})
            room = most_bytes
        groups[-1][name] = shape
        room -= size
    if len(groups) == 1:
        return [File(SINGLE, groups[0], dtype)]
    count = len(groups)
    return [File(f"model-{at:05}-of-{count:05}.safetensors", group, dtype) for at, group in enumerate(groups, 1)]


def write_index(folder: Path, parts: Sequence[File]) -> None:
    """Which file has which tensor; nothing, if there is one."""
    if len(parts) == 1:
        return
    places = {name: part.name for part in parts for name in part.tensors}
    content = {"metadata": {"total_size": sum(part.size for part in parts)}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write(folder: Path, file: File, tensor: Callable[[str], NDArray[Any]], written: Callable[[int], None]) -> None:
    """One file: it has its name once it is whole and on the disk. `written` is told of bytes."""
    unfinished = folder / f"{file.name}.unfinished"
    dtype = np.dtype(np.float32 if file.dtype == "float32" else ml_dtypes.bfloat16)
    with unfinished.open("wb") as opened:
        opened.write(file.head())
        for name, shape in file.tensors.items():
            array = np.ascontiguousarray(tensor(name))
            assert (array.shape, array.dtype) == (shape, dtype), name
            opened.write(array.view(np.uint8).reshape(-1).data)
            written(array.nbytes)
        opened.flush()
        os.fsync(opened.fileno())
    unfinished.rename(folder / file.name)


def is_whole(folder: Path, file: File) -> bool:
    """Whether the file is there as `write` leaves it."""
    path, head = folder / file.name, file.head()
    if not path.is_file() or path.stat().st_size != len(head) + file.size:
        return False
    with path.open("rb") as opened:
        return opened.read(len(head)) == head
