"""The key of a run: what its rows are a function of, as one sha256."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, cast

CHANGES_NOTHING = (
    "track",
    "hydra",
    "rerun",
    "debug",
    "question",
    "verify",
    "backend.verify",
    "backend.compilation_cache",
)
"""Keys that no row depends on: where and how much is kept, what is checked afterwards, what messages show."""

FORM = 1
"""Part of every key: a new number gives every run a new one."""


def run_key(
    config: Mapping[str, Any],
    *,
    code: str,
    inputs: Mapping[str, str] | None = None,
    strategies: Mapping[str, str] | None = None,
) -> str:
    """sha256 over everything that the rows of a virtual run follow from. Equal keys, equal rows.

    The order of a mapping counts, because it may count in a run (that of tenants does); only that of `inputs` and
    `strategies` does not.

    Args:
        config: resolved and plain. What stands under `CHANGES_NOTHING` is left out.
        code: sha256 of the program's own files.
        inputs: what the input files hold, by the config key that names them (`workload.path`): it takes the place of
            the value there, so that a file may be moved. Keys that the config has not are taken as they are.
        strategies: sha256 of the user's own code and its parameters, by place.
    """
    held = inputs or {}
    parts = {
        "form": FORM,
        "config": _kept(config, "", held),
        "code": code,
        "inputs": sorted(held.items()),
        "strategies": sorted((strategies or {}).items()),
    }
    return hashlib.sha256(json.dumps(parts, separators=(",", ":"), default=repr).encode()).hexdigest()


def _kept(value: Any, key: str, inputs: Mapping[str, str]) -> Any:
    """The value without keys that change nothing, and without names of input files.

    Mappings become lists of pairs: in JSON the keys 1 and "1" would be one.
    """
    if key in inputs:
        return {"input": key}
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        named = [(name, f"{key}.{name}" if key else str(name), item) for name, item in items]
        return {"keys": [[name, _kept(item, at, inputs)] for name, at, item in named if at not in CHANGES_NOTHING]}
    if isinstance(value, list | tuple):
        return [_kept(item, f"{key}[{index}]", inputs) for index, item in enumerate(cast("list[Any]", value))]
    return value
