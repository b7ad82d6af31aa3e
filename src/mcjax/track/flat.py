"""A config, or a summary, as one level of keys: `sched.prefill.alpha`, `ttft_s.p90`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"ttft_s": {"p50": 1}}` as `{"ttft_s.p50": 1}`; a list, and an empty mapping, is one value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found.update(flat(cast("Mapping[str, Any]", value), f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found


def text_of(value: Any) -> str:
    """A value as the command line would take it; equal values give equal texts."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, separators=(",", ":"), default=str)
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
