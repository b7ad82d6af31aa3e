"""Strategies given as Python objects or plain functions, in the place of what a config names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from mcjax.errors import ConfigError

METHODS = {
    "prefill": "choose",
    "decode": "choose",
    "fetch": "source",
    "admission": "admit",
    "tenancy": "next",
    "batching": "choose",
    "roles": "assign",
    "eviction": "victims",
    "watermark": "levels",
    "workload": "sessions",
    "cost": "prefill_ns",
    "slo": "bounds",
}
"""Places that can be filled, and the method that shows an object fits."""

AS_FUNCTIONS = ("prefill", "decode", "fetch", "admission", "batching", "roles", "watermark", "slo")
"""Places whose strategy is one method, so that a plain function will do."""


class Function:
    """A plain function in the place of a strategy; decisions record the function's name."""

    def __init__(self, method: str, function: Any):
        setattr(self, method, function)
        self.__class__ = type(getattr(function, "__name__", "function"), (Function,), {"__init__": Function.__init__})


class Plugins:
    """What the caller of `mcjax.run` gave. Raises `ConfigError` for unknown places and for what cannot fill them."""

    def __init__(self, given: Mapping[str, Any]):
        self._given: dict[str, Any] = {}
        for place, strategy in given.items():
            if place not in METHODS:
                close = difflib.get_close_matches(place, METHODS, 1)
                hint = f"no such strategy{f', did you mean {close[0]}' if close else ''}"
                raise ConfigError(place, strategy, hint, METHODS)
            self._given[place] = self._fit(place, strategy)

    @staticmethod
    def _fit(place: str, strategy: Any) -> Any:
        if isinstance(strategy, type):
            strategy = strategy()
        if hasattr(strategy, METHODS[place]):
            return strategy
        if callable(strategy) and place in AS_FUNCTIONS:
            return Function(METHODS[place], strategy)
        raise ConfigError(place, strategy, f"has no method {METHODS[place]!r}")

    def get(self, place: str) -> Any:
        return self._given.get(place)
