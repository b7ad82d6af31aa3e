"""The shape of a checkpoint, from the checkpoint alone. Free of jax."""

from __future__ import annotations

from dataclasses import replace

from mcjax.cost.model_shape import ModelShape
from mcjax.models import gguf_shape
from mcjax.models.checkpoint import locate
from mcjax.models.orbax_directory import is_orbax, read_directory


def shape_at(checkpoint: str, dtype_bytes: int | None = None) -> ModelShape:
    """Of a GGUF file, a directory with `config.json`, or one that Orbax wrote; told apart by what is there.

    `dtype_bytes` None: that of the checkpoint. Raises `ConfigError`.
    """
    path = locate(checkpoint)
    if is_orbax(path):
        shape = read_directory(path).shape
        width = dtype_bytes or shape.dtype_bytes
        return replace(shape, checkpoint=checkpoint, dtype_bytes=width, kv_dtype_bytes=width)
    if path.is_dir():
        return ModelShape.read(str(path), "", dtype_bytes, dtype_bytes, checkpoint)
    return gguf_shape.read(checkpoint, "", dtype_bytes)
