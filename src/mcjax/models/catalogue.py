"""From a model shape to the model: weights of its checkpoint, or the built-in ones; and the name of what was loaded."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import jax
from jax import ShapeDtypeStruct

from mcjax.cost.model_shape import ModelShape
from mcjax.cost.parameters import Parameter
from mcjax.errors import ConfigError
from mcjax.models import builtin
from mcjax.models.checkpoint import KEY, locate
from mcjax.models.decoder import Decoder, check_served
from mcjax.models.digests import sha256_of
from mcjax.models.gguf_file import GGUFFile
from mcjax.models.gguf_weights import GGUFWeights
from mcjax.models.orbax_directory import is_orbax, read_directory
from mcjax.models.orbax_weights import OrbaxWeights
from mcjax.models.safetensors_directory import SafetensorsDirectory, weight_files
from mcjax.models.safetensors_weights import SafetensorsWeights
from mcjax.models.weights import PlacedSource


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model, and the `fingerprint` of its weights, config and dtype: part of every block key."""

    model: Decoder
    fingerprint: str


def fingerprint(shape: ModelShape, seed: int) -> str:
    """What `load` would say, without loading: a sha256 over config, dtype and the checkpoint's bytes (or the seed).

    Those of files are kept (`digests`). A directory's files count by what is in them, not by their names.
    """
    check_served(shape)
    if not shape.checkpoint:
        return builtin.fingerprint(shape, seed)
    path = locate(shape.checkpoint)
    if is_orbax(path):
        content = {name: stored.digest for name, stored in read_directory(path).parameters.items()}
        return _named(content, shape)
    try:
        digests = sha256_of(weight_files(path) if path.is_dir() else [path])
    except OSError as problem:
        raise ConfigError(KEY, path, f"cannot be read: {problem.strerror}") from None
    content = sorted(digests) if path.is_dir() else digests[0]
    return _named(content, shape)


def _named(content: object, shape: ModelShape) -> str:
    words = json.dumps({"checkpoint": content, **shape.identity()}, sort_keys=True)
    return hashlib.sha256(words.encode()).hexdigest()


def source(shape: ModelShape, seed: int = 0) -> PlacedSource:
    """The weights of `shape`, to be asked for one by one; `seed` is that of the built-in ones. Reads heads of files.

    Raises `ConfigError` for a checkpoint that is not there, is damaged, or is of another shape.
    """
    check_served(shape)
    if not shape.checkpoint:
        return builtin.SeededWeights(shape, seed)
    path = locate(shape.checkpoint)
    if is_orbax(path):
        return OrbaxWeights(read_directory(path), shape)
    if path.is_dir():
        try:
            return SafetensorsWeights(SafetensorsDirectory(path), shape)
        except ConfigError as problem:
            if shape.checkpoint.startswith(builtin.TRAINED):
                problem.add_note("the built-in weights have one size; model.checkpoint='' takes random ones of any")
            raise
    return GGUFWeights(GGUFFile(path), shape)


def outline(shape: ModelShape, max_positions: int) -> Decoder:
    """The model with its rotary tables, and instead of parameters their shapes and types."""

    def described(name: str, parameter: Parameter) -> jax.Array:
        return ShapeDtypeStruct(parameter.shape, shape.dtype)  # pyright: ignore[reportReturnType]

    return Decoder(shape, max_positions, described)


def load(shape: ModelShape, seed: int = 0, max_positions: int = 4096) -> Loaded:
    """The model of `shape`, whole on jax's default device. Raises what `source` raises."""
    weights = source(shape, seed)
    return Loaded(Decoder(shape, max_positions, weights), fingerprint(shape, seed))
