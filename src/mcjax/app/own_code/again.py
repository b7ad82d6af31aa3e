"""Makes values again that `told.py` told."""

from __future__ import annotations

import base64
import collections
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mcjax.app.own_code.source import Unknown

Told = dict[str, Any]


class Again:
    """`find("my_policy:Mine")` gives classes and functions.

    `made` raises `Unknown` for what was told in a way that does not allow it.
    """

    def __init__(self, find: Callable[[str], Any]):
        self._find = find
        self._seen: dict[str, Any] = {}

    def made(self, told: Any) -> Any:
        if not isinstance(told, dict):
            return told
        values = cast("Told", told)
        kind = next(iter(values))
        make = getattr(self, f"_{kind}", None)
        if make is None:
            raise Unknown(f"a {kind} cannot be made again from its record")
        return make(values)

    def _keep(self, told: Told, value: Any) -> Any:
        self._seen[told["at"]] = value
        return value

    def _same(self, told: Told) -> Any:
        if told["same"] not in self._seen:
            raise Unknown("it shares something with another strategy, which was not made again")
        return self._seen[told["same"]]

    def _float(self, told: Told) -> float:
        return float(told["float"])

    def _bytes(self, told: Told) -> bytes:
        return bytes.fromhex(told["bytes"])

    def _number(self, told: Told) -> Any:
        return np.frombuffer(bytes.fromhex(told["bytes"]), np.dtype(told["number"]))[0]

    def _path(self, told: Told) -> Path:
        return Path(told["path"])

    def _tuple(self, told: Told) -> tuple[Any, ...]:
        return tuple(self.made(item) for item in told["tuple"])

    def _frozenset(self, told: Told) -> frozenset[Any]:
        return frozenset(self.made(item) for item in told["frozenset"])

    def _list(self, told: Told) -> list[Any]:
        found: list[Any] = self._keep(told, [])
        found.extend(self.made(item) for item in told["list"])
        return found

    def _set(self, told: Told) -> set[Any]:
        found: set[Any] = self._keep(told, set())
        found.update(self.made(item) for item in told["set"])
        return found

    def _deque(self, told: Told) -> Any:
        found: collections.deque[Any] = self._keep(told, collections.deque(maxlen=told["most"]))
        found.extend(self.made(item) for item in told["deque"])
        return found

    def _mapping(self, told: Told) -> Any:
        kinds: dict[str, Callable[[], Any]] = {
            "dict": dict,
            "OrderedDict": collections.OrderedDict,
            "Counter": collections.Counter,
            "defaultdict": partial(collections.defaultdict[Any, Any], self.made(told.get("default"))),
        }
        found = self._keep(told, kinds[told["mapping"]]())
        for key, item in told["items"]:
            name = self.made(key)
            found[name] = self.made(item)
        return found

    def _array(self, told: Told) -> NDArray[Any]:
        if "base64" not in told:
            raise Unknown("an array was too large to be kept")
        found = np.frombuffer(base64.b64decode(told["base64"]), np.dtype(told["array"])).reshape(told["shape"]).copy()
        found.flags.writeable = told["writeable"]
        return self._keep(told, found)

    def _generator(self, told: Told) -> np.random.Generator:
        state = self.made(told["generator"])
        found = np.random.Generator(getattr(np.random, state["bit_generator"])())
        found.bit_generator.state = state
        return self._keep(told, found)

    def _partial(self, told: Told) -> Any:
        function, arguments, keywords = (self.made(part) for part in told["partial"])
        return self._keep(told, partial(function, *arguments, **keywords))

    def _module(self, told: Told) -> Any:
        return self._find(told["module"])

    def _named(self, told: Told) -> Any:
        found = self._find(told["named"])
        return self._keep(told, found) if "at" in told else found

    def _member(self, told: Told) -> Any:
        return self.made(told["member"])[told["name"]]

    def _object(self, told: Told) -> Any:
        owner = self.made(told["object"])
        found = self._keep(told, owner.__new__(owner))
        for name, part in told["state"]:
            object.__setattr__(found, name, self.made(part))
        return found
