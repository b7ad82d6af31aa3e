"""Definitions of a notebook or a script, put together as a module that can be imported."""

from __future__ import annotations

import ast
import json
import sys
from types import ModuleType
from typing import Any

HEAD = '''"""Code that a run used, as it was then. mcjax wrote this file; `mcjax rerun` reads it."""

from __future__ import annotations

import json

from mcjax.app.own_code.again import Again
from mcjax.app.own_code.importing import found


def _found(name):
    module, _, path = name.partition(":")
    return globals()[path] if module == "__main__" else found(name)


'''


class Loose:
    """Collects definitions, and what they refer to by name, in an order in which they can be executed."""

    def __init__(self) -> None:
        self.pieces: list[tuple[str, str]] = []
        """Name and source of each definition; what a reference means, as `name=value`."""
        self._names: dict[str, Any] = {}
        self._lines: list[str] = []
        self._conflict = ""

    def refer(self, name: str, value: Any, told: Any, definition: bool) -> None:
        """A definition uses `name`, which is `value`; `definition`: another definition of the same notebook."""
        meaning = json.dumps(told, separators=(",", ":"), default=repr)
        if name in self._names:
            if self._names[name] is not value:
                self._conflict = name
                self.pieces.append((name, f"={meaning}"))
            return
        self._names[name] = value
        self.pieces.append((name, f"={meaning}"))
        if not definition:
            self._lines.append(_line(name, value, meaning))
        elif value.__name__ != name and value.__name__.isidentifier():
            self._lines.append(f"{name} = {value.__name__}\n")

    def define(self, name: str, source: str) -> None:
        self.pieces.append((name, source))
        self._lines.append(f"\n{source}\n")

    def text(self) -> str:
        """The module. One that would not mean the same says so when it is imported."""
        if self._conflict:
            return f"{HEAD}raise ImportError({f'{self._conflict} had several meanings'!r})\n"
        return HEAD + "".join(self._lines)


def _line(name: str, value: Any, meaning: str) -> str:
    """A line that gives `name` its value."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__}" + (f" as {name}\n" if name != value.__name__ else "\n")
    module, own = getattr(value, "__module__", None), getattr(value, "__name__", "")
    if module in sys.modules and getattr(sys.modules[module], str(own), None) is value:
        return f"from {module} import {own}" + (f" as {name}\n" if name != own else "\n")
    try:
        if ast.literal_eval(repr(value)) == value:
            return f"{name} = {value!r}\n"
    except (ValueError, SyntaxError, TypeError):
        pass
    return f"{name} = Again(_found).made(json.loads({meaning!r}))\n"
