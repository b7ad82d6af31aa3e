"""Keeps secrets out of what a run writes down: the values of secret-looking environment variables are blanked."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, cast

REDACTED = "<redacted>"
_SECRET_NAME = re.compile("TOKEN|SECRET|KEY|PASSWORD|SALT", re.IGNORECASE)
_PLAIN_VALUES = frozenset({"true", "false", "none", "null", "auto", "default"})
"""Settings such as TOKENIZERS_PARALLELISM=false have a secret-looking name; blanking such words would ruin a config."""
_SHORTEST = 4


def secrets(environment: Mapping[str, str] | None = None) -> list[str]:
    """Values that must not be written, the longest first, so that one inside another is blanked whole."""
    environment = os.environ if environment is None else environment
    values = {value for name, value in environment.items() if _SECRET_NAME.search(name) and _is_secret(value)}
    return sorted(values, key=lambda value: (-len(value), value))


def redact(value: Any, hidden: list[str] | None = None) -> Any:
    """The same value (text, or nested lists and mappings of it) with every secret replaced by `<redacted>`."""
    hidden = secrets() if hidden is None else hidden
    if isinstance(value, str):
        for secret in hidden:
            value = value.replace(secret, REDACTED)
        return value
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {redact(key, hidden): redact(item, hidden) for key, item in items}
    if isinstance(value, list | tuple):
        return [redact(item, hidden) for item in cast("list[Any]", value)]
    return value


def _is_secret(value: str) -> bool:
    return len(value) >= _SHORTEST and value.lower() not in _PLAIN_VALUES
