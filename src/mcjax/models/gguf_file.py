"""GGUF files: metadata, and tensors dequantised by the `gguf` package. Whatever is wrong with one is a typed error.

Free of jax.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import ConfigError, MissingExtra
from mcjax.models.checkpoint import KEY
from mcjax.models.gguf_header import TensorPlace, read_header

T = TypeVar("T")

DEQUANTISED_BYTES = 4 << 20
"""Of a tensor at a time."""
FLOAT32 = 0
"""The number of that GGML type."""


class GGUFFile:
    """An open file. Raises `ConfigError` for one that cannot be read, or is damaged."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as opened:
                self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            self._data = np.frombuffer(self._map, np.uint8)
            self._header = read_header(self._data.data)
        except OSError as problem:
            raise ConfigError(KEY, path, f"cannot be read: {problem.strerror}") from None
        except ValueError as problem:  # also bad UTF-8, and a file of no bytes
            raise self.damaged(str(problem)) from None

    def damaged(self, problem: str) -> ConfigError:
        return ConfigError(KEY, self.path, f"is no GGUF file, or a damaged one ({problem})")

    @property
    def tensor_names(self) -> list[str]:
        return list(self._header.tensors)

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._header.metadata

    @property
    def all_float32(self) -> bool:
        """Whether nothing was lost in writing it."""
        return all(place.kind == FLOAT32 for place in self._header.tensors.values())

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Rows first. Raises `ConfigError` if the tensor is not there."""
        return self._place(name).shape

    def _place(self, name: str) -> TensorPlace:
        if name not in self._header.tensors:
            raise ConfigError(KEY, self.path, f"lacks the tensor {name}")
        return self._header.tensors[name]

    def value(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The metadata at `key`. Raises `ConfigError` for another type, and for one that is absent without default."""
        value = self._header.metadata.get(key, default)
        if value is None:
            raise ConfigError(KEY, self.path, f"lacks the metadata {key}")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(KEY, self.path, f"its metadata {key} is of type {type(value).__name__}")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings."""
        return self._all(key, str)

    def wholes(self, key: str) -> list[int]:
        """A list of whole numbers."""
        return self._all(key, int)

    def _all(self, key: str, kind: type[T]) -> list[T]:
        values = cast("list[Any]", self.value(key, list))
        if not all(isinstance(value, kind) for value in values):
            raise ConfigError(KEY, self.path, f"its metadata {key} must be a list of {kind.__name__}")
        return values

    def tensor(self, name: str, part: slice | None = None) -> NDArray[np.float32]:
        """A tensor, dequantised, rows first (`[out, in]`); `part`: of its first dimension, so much and no more.

        Raises `ConfigError` if it is not there, or of a type that cannot be dequantised; `MissingExtra` without `gguf`.
        """
        try:
            gguf = import_module("gguf")
        except ImportError:
            raise MissingExtra("gguf", "gguf") from None
        place = self._place(name)
        kind = next((kind for kind in gguf.GGMLQuantizationType if kind == place.kind), None)
        if kind is None:
            raise self.damaged(f"{name} is of the unknown type {place.kind}")
        together, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        *rows, width = place.shape
        row_bytes = width // together * block_bytes
        end = place.offset + math.prod(rows) * row_bytes
        if width % together or end > len(self._data):
            raise self.damaged(f"{name}, {list(place.shape)} of {kind.name}, ends at byte {end} of {len(self._data)}")
        stored = np.asarray(self._data[place.offset : end]).reshape(*rows, row_bytes)[part or slice(None)]
        shape = (*stored.shape[:-1], width)
        stored = stored.reshape(-1, row_bytes)
        numbers = np.empty((len(stored), width), np.float32)
        step = max(1, DEQUANTISED_BYTES // (4 * max(width, 1)))
        try:
            for start in range(0, len(stored), step):  # the library takes several times what it gives
                numbers[start : start + step] = gguf.dequantize(stored[start : start + step], kind)
            if hasattr(mmap, "MADV_DONTNEED"):  # what was read need not stay in memory
                begin = place.offset - place.offset % mmap.PAGESIZE
                self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)
            return numbers.reshape(shape)
        except NotImplementedError:
            problem = f"its tensor {name} is of type {kind.name}, which gguf cannot dequantise"
            raise ConfigError(KEY, self.path, problem) from None
