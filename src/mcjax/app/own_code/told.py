"""Values as JSON that says everything about them: equal texts, equal values.

A mutable value that occurs again is told by where it was told first, so that two strategies that share an estimator
differ from two that have one each. `again.py` goes the other way.
"""

from __future__ import annotations

import base64
import collections
import enum
import hashlib
import json
import logging
import math
import random
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mcjax.app.own_code.homes import home_of
from mcjax.app.own_code.source import Unknown

KEPT_ARRAY_BYTES = 1 << 20
"""Larger arrays are told by their hash alone."""
_STATELESS = ("abc", "typing", "typing_extensions", "collections.abc")
"""Modules whose classes, as bases, hold nothing."""
_VALUES = ("datetime", "decimal", "fractions", "uuid", "zoneinfo")
"""Modules whose objects are what their repr says."""
_ANNOTATIONS = ("typing", "types", "collections.abc", "typing_extensions", "jaxtyping")


class Teller:
    """Tells values one after the other. `follow(thing)` hears of each class, function and module on the way."""

    def __init__(self, follow: Callable[[Any], None]):
        self._follow = follow
        self._seen: dict[int, str] = {}
        self._alive: list[Any] = []
        """An id stands for a value only as long as that lives."""
        self._place, self._count = "", 0

    def begin(self, place: str) -> None:
        """What follows belongs to `place`: its numbers do not depend on what else is told."""
        self._place, self._count = place, 0

    def told(self, value: Any) -> Any:
        """Raises `Unknown` naming what cannot be told."""
        kind = cast("type[Any]", type(value))
        if value is None or kind in (bool, str, int):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        simple = _simple(value, kind)
        if simple is not None:
            return simple
        if isinstance(value, ModuleType):
            self._follow(value)
            return {"module": value.__name__}
        if kind in (tuple, frozenset):
            return {kind.__name__: self._items(value)}
        if isinstance(value, enum.Enum):
            return {"member": self.told(kind), "name": value.name}
        if isinstance(value, MethodType):
            return {"method": value.__name__, "of": self.told(value.__self__)}
        if isinstance(value, type) or (_has_a_name(value) and not isinstance(value, FunctionType)):
            self._follow(value)
            return {"named": name_of(value)}
        if id(value) in self._seen:
            return {"same": self._seen[id(value)]}
        at = f"{self._place}.{self._count}"
        self._seen[id(value)] = at
        self._alive.append(value)
        self._count += 1
        return {**self._mutable(value, kind), "at": at}

    def _mutable(self, value: Any, kind: type) -> dict[str, Any]:
        if kind in (list, set):
            return {kind.__name__: self._items(value)}
        if kind in (dict, collections.OrderedDict, collections.Counter):
            return {"mapping": kind.__name__, "items": self._pairs(value)}
        if kind is collections.defaultdict:
            default = self.told(cast("collections.defaultdict[Any, Any]", value).default_factory)
            return {"mapping": kind.__name__, "default": default, "items": self._pairs(value)}
        if kind is collections.deque:
            return {"deque": self._items(value), "most": cast("collections.deque[Any]", value).maxlen}
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, np.ndarray):
            return _array(cast("NDArray[Any]", value), kind)
        if isinstance(value, np.random.Generator):
            return {"generator": self.told(dict(value.bit_generator.state))}
        if kind is random.Random:
            return {"random": self.told(value.getstate())}
        if kind is partial:
            return {"partial": [self.told(part) for part in (value.func, value.args, value.keywords)]}
        return self._object(value, kind)

    def _items(self, values: Iterable[Any]) -> list[Any]:
        told = [self.told(item) for item in values]
        return sorted(told, key=json.dumps) if isinstance(values, set | frozenset) else told  # a set has no order

    def _pairs(self, values: Mapping[Any, Any]) -> list[Any]:
        return [[self.told(key), self._part(repr(key), item)] for key, item in values.items()]

    def _function(self, value: FunctionType) -> dict[str, Any]:
        self._follow(value)
        held = {"closure": cells_of(value), "defaults": value.__defaults__, "keywords": value.__kwdefaults__}
        parts = {name: self._part(name, part) for name, part in {**held, "attributes": value.__dict__}.items() if part}
        return {"named": name_of(value), **parts}

    def _object(self, value: Any, kind: type) -> dict[str, Any]:
        for base in kind.__mro__[:-1]:
            if home_of(base.__module__) not in ("own", "loose", "ours") and base.__module__ not in _STATELESS:
                raise Unknown(f"what a {kind.__module__}.{kind.__qualname__} holds cannot be told")
        owner = self.told(kind)
        return {"object": owner, "state": [[name, self._part(name, part)] for name, part in state_of(value).items()]}

    def _part(self, name: str, part: Any) -> Any:
        try:
            return self.told(part)
        except Unknown as problem:
            raise Unknown(f"{name}: {problem}") from None


def cells_of(function: FunctionType) -> dict[str, Any]:
    """The values of a function's free variables; without those that have none yet."""
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue
    return found


def state_of(value: Any) -> dict[str, Any]:
    """Attributes of an object: of its slots, and of its dictionary."""
    slots = [
        name
        for base in type(value).__mro__
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType)
    ]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**found, **getattr(value, "__dict__", {})}


def name_of(value: Any) -> str:
    """`my_policy:Mine`."""
    module = getattr(value, "__module__", None) or ("numpy" if isinstance(value, np.ufunc) else "builtins")
    return f"{module}:{getattr(value, '__qualname__', None) or value.__name__}"


def _has_a_name(value: Any) -> bool:
    """Whether something that is not written in Python goes by a name in its module: a ufunc, a cached function."""
    if isinstance(value, BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, ModuleType)
    name, module = getattr(value, "__name__", None), getattr(value, "__module__", None)
    home = sys.modules.get(module or "numpy")
    return isinstance(name, str) and getattr(home, name, None) is value


def _simple(value: Any, kind: type) -> dict[str, Any] | None:
    """Immutable values of the libraries that people use."""
    if kind in (bytes, bytearray):
        return {kind.__name__: bytes(value).hex()}
    if isinstance(value, np.generic):
        number = cast("Any", value)
        return {"number": number.dtype.str, "bytes": number.tobytes().hex()} if number.dtype.kind != "V" else None
    if isinstance(value, np.dtype):
        return {"dtype": str(cast("Any", value))}
    if isinstance(value, PurePath):
        return {"path": str(value)}
    if isinstance(value, re.Pattern):
        pattern = cast("re.Pattern[Any]", value)
        return {"pattern": str(pattern.pattern), "flags": pattern.flags}
    if isinstance(value, logging.Logger):
        return {"logger": value.name}
    if kind in (complex, range, slice, type(Ellipsis), type(NotImplemented)) or kind.__module__ in _VALUES:
        return {"value": f"{kind.__module__}.{kind.__name__}", "repr": str(value.__repr__())}
    if (
        kind.__module__ in _ANNOTATIONS
        and kind is not SimpleNamespace
        and " at 0x" not in (text := str(value.__repr__()))
    ):
        return {"annotation": text}
    return None


def _array(value: NDArray[Any], kind: type) -> dict[str, Any]:
    if kind is not np.ndarray or value.dtype.hasobject or value.dtype.names:
        raise Unknown(f"what a {kind.__name__} of {value.dtype} holds cannot be told")
    held = np.ascontiguousarray(value).tobytes()
    told = {"array": value.dtype.str, "shape": list(value.shape), "writeable": bool(value.flags.writeable)}
    if len(held) > KEPT_ARRAY_BYTES:
        return {**told, "sha256": hashlib.sha256(held).hexdigest()}
    return {**told, "base64": base64.b64encode(held).decode()}
