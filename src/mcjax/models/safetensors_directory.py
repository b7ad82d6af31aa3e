"""The tensors of a model directory: `model.safetensors`, or several files and an index. Memory-mapped, free of jax."""

from __future__ import annotations

import mmap
from collections import deque
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mcjax.errors import ConfigError
from mcjax.models.checkpoint import KEY
from mcjax.models.directory_json import read_object
from mcjax.models.safetensors_header import TensorPlace, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Those that weights may have."""


class SafetensorsDirectory:
    """A directory's weights: heads of files are read at once, tensors when asked for.

    Raises `ConfigError` for a directory without weights, and for files that are damaged or disagree.
    """

    def __init__(self, path: Path):
        self.path = path
        self._home: dict[str, tuple[Path, TensorPlace]] = {}
        self._mapped: dict[Path, mmap.mmap] = {}
        self._read: deque[tuple[mmap.mmap, int, int]] = deque(maxlen=2)
        self.files = weight_files(path)
        """In the order of their names."""
        for file in self.files:
            self._open(file)
        self._check_index()

    @property
    def names(self) -> list[str]:
        return list(self._home)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor. Raises `ConfigError` if it is not there."""
        return self._place(name)[1].shape

    def file(self, name: str) -> Path:
        """Where a tensor lies. Raises `ConfigError` if it is not there."""
        return self._place(name)[0]

    def check_dtype(self, name: str) -> np.dtype[Any]:
        """Of a tensor. Raises `ConfigError` for one that weights do not have here."""
        file, place = self._place(name)
        if place.dtype not in DTYPES:
            fix = "quantised checkpoints are not read: take one in BF16, or convert it"
            raise ConfigError(KEY, file, f"its tensor {name} is of dtype {place.dtype}; {fix}", DTYPES)
        return DTYPES[place.dtype]

    def tensor(self, name: str) -> NDArray[Any]:
        """A tensor as it lies in its file: nothing is read before its numbers are looked at. Raises `ConfigError`."""
        dtype = self.check_dtype(name)
        file, place = self._place(name)
        data = self._mapped[file]
        self._read.append((data, place.begin, place.end))
        return np.frombuffer(data, dtype, (place.end - place.begin) // dtype.itemsize, place.begin).reshape(place.shape)

    def forget(self) -> None:
        """The pages of the tensors asked for last need not stay in memory; whoever looks again reads again."""
        for data, begin, end in self._read:
            if hasattr(mmap, "MADV_DONTNEED"):
                begin -= begin % mmap.PAGESIZE
                data.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def _place(self, name: str) -> tuple[Path, TensorPlace]:
        if name not in self._home:
            raise ConfigError(KEY, self.path, f"lacks the tensor {name}: is the download complete?")
        return self._home[name]

    def _open(self, file: Path) -> None:
        try:
            with file.open("rb") as opened:
                data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            places = read_header(memoryview(data))
        except OSError as problem:
            raise ConfigError(KEY, file, f"cannot be read: {problem.strerror}") from None
        except ValueError as problem:  # also a file of no bytes
            raise ConfigError(
                KEY, file, f"is no safetensors file, or a damaged one ({problem}): fetch it again"
            ) from None
        for name, place in places.items():
            if name in self._home:
                other = self._home[name][0].name
                raise ConfigError(KEY, file, f"has the tensor {name}, as {other} has: one of the two must go")
            self._home[name] = file, place
        self._mapped[file] = data

    def _check_index(self) -> None:
        for name, file in _index(self.path).items():
            found = self._home.get(name)
            if found is None or found[0].name != file:
                where = "no file has it" if found is None else f"it is in {found[0].name}"
                raise ConfigError(KEY, self.path / INDEX, f"says that the tensor {name} is in {file}, and {where}")


def has_weights(path: Path) -> bool:
    """Whether a directory has what `SafetensorsDirectory` reads."""
    return (path / SINGLE).exists() or (path / INDEX).exists()


def weight_files(path: Path) -> list[Path]:
    """The files with the weights of a model directory. Raises `ConfigError` if there are none, or one is missing."""
    single, index = path / SINGLE, path / INDEX
    if index.exists():
        names = sorted(set(_index(path).values()))
        if single.exists() and SINGLE not in names:
            raise ConfigError(KEY, path, f"has {SINGLE} beside {INDEX}, which does not name it: one of the two must go")
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ConfigError(KEY, index, f"names the file {name!r}, which is no .safetensors file beside it")
            if not (path / name).is_file():
                raise ConfigError(KEY, index, f"names the file {name}, which is not there: is the download complete?")
        return [path / name for name in names]
    if not single.is_file():
        others = sorted(file.name for file in path.glob("*.safetensors"))
        beside = f", though {', '.join(others[:3])}" if others else ""
        raise ConfigError(KEY, path, f"has neither {SINGLE} nor {INDEX}{beside}")
    return [single]


def _index(path: Path) -> dict[str, str]:
    """The file's name by tensor; empty, if there is no index."""
    index = path / INDEX
    if not index.exists():
        return {}
    places: object = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ConfigError(KEY, index, "has no weight_map that says where tensors are")
    named = cast("dict[str, object]", places)
    for name, file in named.items():
        if not isinstance(file, str):
            raise ConfigError(KEY, index, f"its weight_map says of {name} no file name")
    return cast("dict[str, str]", named)
