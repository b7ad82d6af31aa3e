"""Strategies given as Python objects or plain functions, in the place of what a config names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from mcjax.app.mistakes import close_to
from mcjax.app.own_code.collect import Own
from mcjax.cost.base import CostModel
from mcjax.cost.slo import SLOPolicy
from mcjax.errors import ConfigError
from mcjax.kvpool.base import Eviction, Tiering, Watermark
from mcjax.sched.base import Admission, Batching, DecodeSelection, Fetch, PrefillSelection, Roles, Tenancy
from mcjax.transfer.paths.base import PathChoice
from mcjax.workload.base import LengthPredictor, Workload

PLACES: Mapping[str, tuple[str, type]] = {
    "prefill": ("sched.prefill", PrefillSelection),
    "decode": ("sched.decode", DecodeSelection),
    "fetch": ("sched.fetch", Fetch),
    "admission": ("sched.admission", Admission),
    "tenancy": ("sched.tenancy", Tenancy),
    "batching": ("sched.batching", Batching),
    "roles": ("sched.roles", Roles),
    "lengths": ("sched.lengths", LengthPredictor),
    "eviction": ("kvpool.eviction", Eviction),
    "watermark": ("kvpool.watermark", Watermark),
    "tiering": ("kvpool.tiering", Tiering),
    "paths": ("transfer.paths", PathChoice),
    "workload": ("workload", Workload),
    "cost": ("cost", CostModel),
    "slo": ("slo", SLOPolicy),
}
"""What can be put where: its key in the config, and its protocol. One of a single method may be a function."""


def methods(protocol: type) -> list[str]:
    """The methods that a protocol asks for."""
    return [name for name, value in vars(protocol).items() if inspect.isfunction(value) and not name.startswith("_")]


def as_strategy(method: str, function: Any) -> Any:
    """An object with `function` as its one method, of a class that bears the function's name: decisions record it."""
    return type(getattr(function, "__name__", "function"), (), {method: staticmethod(function)})()


def fit(place: str, strategy: Any, key: str = "") -> Any:
    """A strategy for `place`: an object as it is, a class called, a function wrapped.

    Raises `ConfigError` naming `key` (`place`, if there is none) for what does not fit.
    """
    key, protocol = key or place, PLACES[place][1]
    needed = methods(protocol)
    if isinstance(strategy, type):
        try:
            strategy = strategy()
        except TypeError as problem:
            raise ConfigError(key, strategy.__name__, f"cannot be made without arguments ({problem})") from problem
    name = getattr(strategy, "__name__", type(strategy).__name__)
    if len(needed) == 1 and inspect.isroutine(strategy):
        strategy = as_strategy(needed[0], strategy)
    lacking = [method for method in needed if not callable(getattr(strategy, method, None))]
    if lacking:
        raise ConfigError(
            key, name, f"lacks the method {', '.join(lacking)}; a {protocol.__name__} has {', '.join(needed)}"
        )
    for method in needed:
        _check_parameters(key, name, getattr(strategy, method), getattr(protocol, method))
    return strategy


def _check_parameters(key: str, name: str, method: Any, model: Any) -> None:
    asked = [word for word in inspect.signature(model).parameters if word != "self"]
    try:
        inspect.signature(method).bind(*asked)
    except ValueError:  # written in C
        return
    except TypeError as problem:
        raise ConfigError(key, name, f"must take {model.__name__}({', '.join(asked)}): {problem}") from problem


class Plugins:
    """What the caller of `mcjax.run` gave. Raises `ConfigError` for unknown places and for what cannot fill them."""

    def __init__(self, given: Mapping[str, Any]):
        self._given: dict[str, Any] = {}
        self._original = dict(given)
        self.collected: Mapping[str, tuple[str, Own]] = {}
        """Name and code of each, if they are on their way to a process in which it could not be found out."""
        for place, strategy in given.items():
            if place not in PLACES:
                raise ConfigError(place, type(strategy).__name__, f"no such strategy{close_to(place, PLACES)}", PLACES)
            self._given[place] = fit(place, strategy)

    def get(self, place: str) -> Any:
        return self._given.get(place)

    def original(self, place: str) -> Any:
        """What the caller gave: a function as it is, the object of a class."""
        original = self._original.get(place)
        return self._given[place] if isinstance(original, type) else original

    def names(self) -> dict[str, str]:
        """What was given, for the record: place and class."""
        return {place: type(strategy).__name__ for place, strategy in self._given.items()}
