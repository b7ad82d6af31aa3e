"""JSON files of a model directory. Free of jax."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from mcjax.errors import ConfigError
from mcjax.models.checkpoint import KEY

LARGEST_BYTES = 256 << 20
"""Far beyond any of them; what is larger was not written as one."""


def read_text(file: Path) -> str:
    """Raises `ConfigError` for a file that cannot be read, or is no text."""
    try:
        if file.stat().st_size > LARGEST_BYTES:
            raise ConfigError(KEY, file, "is far too large to be what its name says")
        return file.read_text(encoding="utf-8")
    except OSError as problem:
        raise ConfigError(KEY, file, f"cannot be read: {problem.strerror}") from None
    except ValueError:
        raise ConfigError(KEY, file, "is no text in UTF-8: fetch it again") from None


def read_object(file: Path, optional: bool = False) -> dict[str, Any]:
    """The object in a file; an empty one if it is `optional` and not there. Raises `ConfigError`."""
    if optional and not file.exists():
        return {}
    try:
        content: object = json.loads(read_text(file))
    except (ValueError, RecursionError) as problem:
        raise ConfigError(KEY, file, f"is no JSON ({str(problem)[:100]}): fetch it again") from None
    if not isinstance(content, dict):
        raise ConfigError(KEY, file, "does not hold a JSON object")
    return cast("dict[str, Any]", content)
