"""Kinds of plain values: whether a value is of one, and what that is called in words.

A kind is an annotation: of a signature, or of a field of `sections`, which may add bounds: `Annotated[int, Bounds(1)]`.
"""

from __future__ import annotations

import enum
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

WORDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
    type(None): "null",
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Which finite numbers are meant, and of what unit."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    unit: str = ""

    def hold(self, value: float) -> bool:
        """Whether the number lies within. NaN and infinity never do."""
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
        )

    def __str__(self) -> str:
        if self.above is not None:
            return f"more than {self.above:g}" + ("" if self.most is None else f" and at most {self.most:g}")
        if self.most is not None:
            return f"at most {self.most:g}" if self.least is None else f"{self.least:g} to {self.most:g}"
        return "" if self.least is None else f"{self.least:g} or more"


@dataclass(frozen=True, slots=True)
class Form:
    """A value with a notation of its own. `read(key, value)` raises `ConfigError` for what it cannot read."""

    words: str
    read: Callable[[str, Any], object]


def fits(value: Any, kind: Any) -> bool:
    """Whether a plain value may stand for the annotation `kind`. Kinds that no plain value has are let pass."""
    origin, choices = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return all(_fits_bounds(value, choices[0], bounds) for bounds in choices[1:] if isinstance(bounds, Bounds))
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, choice) for choice in choices)
    if origin is typing.Literal:
        return any(value == choice and type(value) is type(choice) for choice in choices)
    plain = _plain_kind(origin or kind)
    if plain is None:
        return not _is_ours(kind) or (isinstance(value, Mapping) and "_target_" in value)
    if isinstance(value, bool):
        return plain is bool
    if plain is float:
        return isinstance(value, int | float)
    if plain is int:  # 80.0e+9 is how people write bytes
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if plain is list and isinstance(value, list) and len(choices) == 1:
        return all(fits(item, choices[0]) for item in cast("list[Any]", value))
    return isinstance(value, plain)


def described(kind: Any) -> str:
    """The annotation in words: `a whole number or null`."""
    origin, choices = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _with_bounds(choices[0], choices[1])
    if origin in (typing.Union, types.UnionType):
        parts = [*dict.fromkeys(described(choice) for choice in choices)]
        return (", or " if any("," in part or " or " in part for part in parts[:-1]) else " or ").join(parts)
    if origin is typing.Literal:
        return ("one of " if len(choices) > 1 else "") + ", ".join(map(str, choices))
    plain = _plain_kind(origin or kind)
    if plain is list and len(choices) == 1 and choices[0] is not Any:
        return f"a list, each {described(choices[0])}"
    if plain is not None:
        return WORDS[plain]
    name = getattr(kind, "__name__", str(kind))
    return f"a {name} (a mapping with its _target_)" if _is_ours(kind) else name


def form_of(kind: Any) -> Form | None:
    """The notation of a kind that has one of its own."""
    found = (form_of(choice) if typing.get_origin(choice) else choice for choice in typing.get_args(kind))
    return next((form for form in found if isinstance(form, Form)), None)


def takes_null(kind: Any) -> bool:
    """Whether null is among what the kind allows."""
    return typing.get_origin(kind) in (typing.Union, types.UnionType) and type(None) in typing.get_args(kind)


def _fits_bounds(value: Any, kind: Any, bounds: Bounds) -> bool:
    if not fits(value, kind):
        return False
    if isinstance(value, float) and kind is int and bounds.unit != "bytes":
        return False
    return bounds.hold(value)


def _with_bounds(kind: Any, told: Bounds | Form) -> str:
    if isinstance(told, Form):
        return told.words
    unit = f" of {told.unit}" if told.unit else ""
    return ", ".join(part for part in (described(kind) + unit, str(told)) if part)


def _is_ours(kind: Any) -> bool:
    """Whether a config can only name what makes it: a class of this package, and no word that stands for itself."""
    return isinstance(kind, type) and kind.__module__.startswith("mcjax.") and not issubclass(kind, enum.Enum)


def _plain_kind(kind: Any) -> type | None:
    if kind in (None, type(None)):
        return type(None)
    if kind in (list, tuple, Sequence):
        return list
    if kind in (dict, Mapping):
        return dict
    return cast("type", kind) if kind in (bool, int, float, str) else None
