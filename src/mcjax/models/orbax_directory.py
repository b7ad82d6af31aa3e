"""What lies in a model directory that Orbax writes: `mcjax.json` describes it. Free of jax, and of Orbax.

`weights/` has an Orbax checkpoint for each block of the model, and one for each parameter outside of them: what is
written, or was not finished, is never more than that.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mcjax.cost.model_shape import ModelShape
from mcjax.cost.parameters import parameters
from mcjax.errors import ConfigError
from mcjax.models.checkpoint import KEY

FORMAT = 1
"""Raised when a directory of before cannot be read any more."""
DESCRIPTION, WEIGHTS = "mcjax.json", "weights"


@dataclass(frozen=True, slots=True)
class Stored:
    """One parameter. `digest`: xxh3-128 of its bytes in C order, as hexadecimal."""

    shape: tuple[int, ...]
    dtype: str
    digest: str


@dataclass(frozen=True, slots=True)
class OrbaxDirectory:
    """A description that has been read, and agrees with itself."""

    path: Path
    shape: ModelShape
    parameters: Mapping[str, Stored]

    def part(self, name: str) -> Path:
        """The Orbax checkpoint that the parameter `name` is in."""
        return self.path / WEIGHTS / part_of(name)


def part_of(name: str) -> str:
    """`blocks.3`, `embedding`, `final_norm`."""
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if first == "blocks" else first


def inside_of(name: str) -> str:
    """The parameter's name within its part."""
    return name.removeprefix(part_of(name)).removeprefix(".") or name


def is_orbax(path: Path) -> bool:
    """Whether a directory is one of these."""
    return (path / DESCRIPTION).is_file()


def description(shape: ModelShape, stored: Mapping[str, Stored]) -> str:
    """The text of `mcjax.json`."""
    values = dataclasses.asdict(dataclasses.replace(shape, checkpoint=""))
    entries = {name: dataclasses.asdict(each) for name, each in stored.items()}
    return json.dumps({"format": FORMAT, "shape": values, "parameters": entries}, indent=1) + "\n"


def read_directory(path: Path) -> OrbaxDirectory:
    """Raises `ConfigError` for a description that is damaged, of another format, or not of what lies beside it."""
    file = path / DESCRIPTION
    try:
        content: object = json.loads(file.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ConfigError(KEY, file, f"cannot be read: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:
        raise ConfigError(KEY, file, f"is no JSON ({str(problem)[:100]}): the directory is damaged") from None
    said = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    if said.get("format") != FORMAT:
        problem = f"is of format {said.get('format')!r}: write it again with this version's mcjax convert"
        raise ConfigError(KEY, file, problem, (FORMAT,))
    shape = _shape(file, said.get("shape"), str(path))
    stored = _stored(file, said.get("parameters"))
    for name, parameter in parameters(shape).items():
        if name not in stored:
            raise ConfigError(KEY, file, f"lacks the parameter {name}: the directory is damaged")
        if stored[name].shape != parameter.shape:
            have, wanted = list(stored[name].shape), list(parameter.shape)
            raise ConfigError(KEY, file, f"its parameter {name} is {have}, and its shape needs {wanted}")
        if not (path / WEIGHTS / part_of(name)).is_dir():
            raise ConfigError(KEY, path / WEIGHTS / part_of(name), f"is not there, and should hold {name}")
    return OrbaxDirectory(path, shape, stored)


def _shape(file: Path, said: object, checkpoint: str) -> ModelShape:
    known = {field.name for field in dataclasses.fields(ModelShape)}
    if not isinstance(said, dict):
        raise ConfigError(KEY, file, "says no shape: the directory is damaged")
    values = cast("dict[str, Any]", said)
    for name in values:
        if name not in known:
            raise ConfigError(KEY, file, f"its shape has the field {name}, which this version does not know")
    try:
        values["checkpoint"] = checkpoint
        return ModelShape(**values)
    except (TypeError, ConfigError) as problem:
        raise ConfigError(KEY, file, f"its shape cannot be read: {problem}") from None


def _stored(file: Path, said: object) -> dict[str, Stored]:
    if not isinstance(said, dict):
        raise ConfigError(KEY, file, "lists no parameters: the directory is damaged")
    result: dict[str, Stored] = {}
    for name, entry in cast("dict[str, Any]", said).items():
        try:
            found = Stored(tuple(entry["shape"]), str(entry["dtype"]), str(entry["digest"]))
            math.prod(found.shape)
        except (TypeError, KeyError):
            raise ConfigError(KEY, file, f"does not describe the parameter {name}: the directory is damaged") from None
        result[name] = found
    return result
