"""Tuned parameters of kernels: data files beside the kernels, looked up by what was measured or compiled nearest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class Tuning:
    """The entries of one file, in its order: `[{"when": {key: value or [least, most]}, "use": {name: value}}]`."""

    entries: tuple[tuple[Mapping[str, Any], Mapping[str, int]], ...]

    def find(self, **case: Any) -> dict[str, int]:
        """The first entry's `use` all of whose conditions hold; a file's last entry has none, and so always does.

        Raises `LookupError` where none holds.
        """
        for when, use in self.entries:
            if all(_holds(condition, case[key]) for key, condition in when.items()):
                return dict(use)
        raise LookupError(f"no entry for {case}, and no last one without conditions")


def _holds(condition: Any, value: Any) -> bool:
    if isinstance(condition, list):
        least, most = cast("list[Any]", condition)
        return (least is None or value >= least) and (most is None or value <= most)
    return bool(condition == value)


@cache
def tuning(package: str, name: str = "tuning.json") -> Tuning:
    """The file of that name in a kernel's package, such as `mcjax.kernels.decode`."""
    entries = json.loads(resources.files(package).joinpath(name).read_text(encoding="utf-8"))
    return Tuning(tuple((entry["when"], entry["use"]) for entry in entries))
