"""A Hugging Face model directory small enough for a test, by safetensors' own writer: random weights by name."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from mcjax.cost.model_shape import ModelShape
from mcjax.models.hugging_face import Dialect, stored

INDEX = "model.safetensors.index.json"


def shape_of(config: dict[str, Any], path: Path | str = "", **changes: Any) -> ModelShape:
    return ModelShape.from_hugging_face(config, "small", checkpoint=str(path), **changes)


def tensors(config: dict[str, Any], dialect: Dialect | None = None, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Normal numbers under every name that a checkpoint of this config has."""
    found: dict[str, np.ndarray] = {}
    for piece, source in stored(shape_of(config), dialect or Dialect()).items():
        for name in source.tensors:
            if name not in found:
                drawn = np.random.default_rng(zlib.crc32(name.encode())).normal(size=source.shape)
                scale = source.shape[-1] ** -0.5 if len(source.shape) > 1 and piece != "embedding" else 0.5
                found[name] = (drawn * scale).astype(dtype)
    return found


def write(path: Path, config: dict[str, Any], weights: Mapping[str, np.ndarray] | None = None, files: int = 1) -> Path:
    """`config.json` and the weights, in so many files, with an index if they are several."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    found = dict(tensors(config) if weights is None else weights)
    if files == 1:
        save_file(found, path / "model.safetensors", metadata={"format": "pt"})
        return path
    places: dict[str, str] = {}
    names = sorted(found)
    for part in range(files):
        file = f"model-{part + 1:05}-of-{files:05}.safetensors"
        save_file({name: found[name] for name in names[part::files]}, path / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names[part::files], file)
    total = sum(array.nbytes for array in found.values())
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))
    return path
