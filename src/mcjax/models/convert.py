"""From any checkpoint to a directory of safetensors or of Orbax, a parameter at a time, taken up where it stopped."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from mcjax.cost.families.written import config_of
from mcjax.cost.model_shape import ModelShape
from mcjax.cost.parameters import Parameter, parameters
from mcjax.errors import ConfigError
from mcjax.models import catalogue, safetensors_writer
from mcjax.models.checkpoint import locate
from mcjax.models.hugging_face_tensors import HuggingFaceTensors
from mcjax.models.orbax_directory import DESCRIPTION, Stored, description
from mcjax.models.orbax_weights import write_parts
from mcjax.models.tokenizer_files import write_tokenizer
from mcjax.models.weights import PlacedSource

KINDS = ("safetensors", "orbax")
STATE = "convert.json"
"""In an unfinished directory: what it is to become, and of what."""
SHARD_BYTES = 5_000_000_000
"""Of a safetensors file, as transformers has it."""

Progress = Callable[[int, int], None]
"""Told of bytes written, of how many."""


@dataclass(frozen=True, slots=True)
class Target:
    """What is to be written."""

    path: Path
    kind: str = "safetensors"
    shard_bytes: int = SHARD_BYTES
    tokenizer: bool = True
    overwrite: bool = False


def convert(shape: ModelShape, target: Target, seed: int = 0, progress: Progress = lambda done, of: None) -> None:
    """Write the weights of `shape.checkpoint` in the shape's dtype; "": the built-in ones of `seed`.

    What is unfinished lies at `PATH.partial`, and is taken up again by the same request for the same weights. Raises
    `ConfigError` for what the source's weights raise, and for a path that is there already.
    """
    unfinished = _room_for(shape, target)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        _convert(shape, target, unfinished, seed, progress)
    _into_place(unfinished, target)


def _convert(shape: ModelShape, target: Target, unfinished: Path, seed: int, progress: Progress) -> None:
    source = catalogue.source(shape, seed)
    request = {
        "weights": catalogue.fingerprint(shape, seed),
        "kind": target.kind,
        "shard_bytes": target.shard_bytes,
    }
    state = _State(unfinished, request)
    if target.kind == "safetensors":
        config = config_of(shape)
        _safetensors(unfinished, shape, source, target.shard_bytes, progress)
    else:
        config = _config_if_any(shape)
        _orbax(unfinished, shape, source, state, progress)
    ids = write_tokenizer(shape.checkpoint, unfinished) if target.tokenizer else {}
    if config:
        (unfinished / "config.json").write_text(json.dumps(config | ids, indent=1) + "\n", encoding="utf-8")
    state.forget()


def _room_for(shape: ModelShape, target: Target) -> Path:
    """The unfinished directory's path, once nothing speaks against it."""
    path = target.path
    if target.kind not in KINDS:
        raise ConfigError("to", target.kind, "is nothing that is written here", KINDS)
    if shape.identity().get("quantisation", "none") != "none":
        raise ConfigError(
            "model.quantisation", shape.quantisation, "weights are quantised as they are loaded", ("none",)
        )
    if path.exists() and not target.overwrite:
        raise ConfigError("destination", path, "is there already; --force replaces it")
    if shape.checkpoint and path.exists() and locate(shape.checkpoint).resolve().is_relative_to(path.resolve()):
        raise ConfigError("destination", path, "holds what is to be converted")
    above = path.resolve().parent
    try:
        above.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(above).free
    except OSError as problem:
        raise ConfigError("destination", path, f"cannot be written: {problem.strerror}") from None
    unfinished = path.with_name(f"{path.name}.partial")
    written = sum(file.stat().st_size for file in unfinished.rglob("*") if file.is_file()) if unfinished.exists() else 0
    needed = _bytes(shape) - written
    if needed > free:
        raise ConfigError("destination", path, f"needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
    return unfinished


def _bytes(shape: ModelShape) -> int:
    return sum(math.prod(each.shape) for each in parameters(shape).values()) * shape.dtype_bytes


class _State:
    """What an unfinished directory remembers: whose it is, and of Orbax' parts which are done."""

    def __init__(self, folder: Path, request: dict[str, Any]):
        self._file = folder / STATE
        self._said: dict[str, Any] = {"request": request, "parts": {}}
        try:
            found: Any = json.loads(self._file.read_text(encoding="utf-8"))
            if found["request"] == request:
                self._said["parts"] = dict(found["parts"])
                return
        except (OSError, ValueError, TypeError, KeyError):
            pass
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        self._write()

    def done(self, part: str) -> dict[str, Stored] | None:
        found = self._said["parts"].get(part)
        return found and {
            name: Stored(tuple(each["shape"]), each["dtype"], each["digest"]) for name, each in found.items()
        }

    def finished(self, part: str, stored: dict[str, Stored]) -> None:
        self._said["parts"][part] = {name: dataclasses.asdict(each) for name, each in stored.items()}
        self._write()

    def forget(self) -> None:
        self._file.unlink()

    def _write(self) -> None:
        unfinished = self._file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self._said), encoding="utf-8")
        unfinished.rename(self._file)


def _safetensors(folder: Path, shape: ModelShape, source: PlacedSource, shard_bytes: int, progress: Progress) -> None:
    def weight(name: str, parameter: Parameter) -> NDArray[Any]:
        return np.asarray(source(name, parameter))

    tensors = HuggingFaceTensors(shape, weight)
    parts = safetensors_writer.files(tensors.shapes, shape.dtype, shard_bytes)
    of, done = sum(part.size for part in parts), 0

    def written(size: int) -> None:
        nonlocal done
        done += size
        progress(done, of)

    for part in parts:
        if safetensors_writer.is_whole(folder, part):
            written(part.size)
        else:
            safetensors_writer.write(folder, part, tensors, written)
    safetensors_writer.write_index(folder, parts)


def _orbax(folder: Path, shape: ModelShape, source: PlacedSource, state: _State, progress: Progress) -> None:
    of, done = _bytes(shape), 0

    def finished(part: str, stored: dict[str, Stored]) -> None:
        nonlocal done
        state.finished(part, stored)
        done += sum(math.prod(each.shape) for each in stored.values()) * shape.dtype_bytes
        progress(done, of)

    stored = write_parts(folder, shape, source, state.done, finished)
    (folder / DESCRIPTION).write_text(description(shape, stored), encoding="utf-8")
    progress(of, of)


def _config_if_any(shape: ModelShape) -> dict[str, Any]:
    """A `config.json` beside Orbax' files, where a family has the shape."""
    try:
        return config_of(shape)
    except ConfigError:
        return {}


def _into_place(unfinished: Path, target: Target) -> None:
    path = target.path
    if not path.exists():
        unfinished.rename(path)
        return
    old = path.with_name(f"{path.name}.replaced")
    path.rename(old)
    unfinished.rename(path)
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old)
    else:
        old.unlink()
