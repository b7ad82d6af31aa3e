"""What a strategy of the user's own is made of: its source, all of theirs that it uses, and its parameters."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any, cast

from mcjax.app.own_code.homes import file_of, home_of, version_of
from mcjax.app.own_code.loose import Loose
from mcjax.app.own_code.source import (
    Unknown,
    functions_of,
    globals_named,
    globals_used,
    imports_of,
    is_current,
    source_of_class,
    source_of_function,
    strings_of,
    text_of_file,
    unwrapped,
)
from mcjax.app.own_code.told import Teller, cells_of, name_of

Hashed = Callable[[str], "tuple[str, str] | None"]
"""The file that a text names and its sha256, or None."""


@dataclass(slots=True)
class Own:
    """One strategy of the user's own. `unknown` says what could not be told: then `sha256` does not identify it."""

    told: Any
    sha256: str
    sources: dict[str, str]
    """File names below `strategies/`, and texts."""
    inputs: dict[str, str]
    """Files that its parameters name, and their sha256."""
    unknown: list[str]


class Collector:
    """Collects strategies one after the other; what two of them share is told once."""

    def __init__(self, hashed: Hashed):
        self._hashed = hashed
        self._teller = Teller(self._follow)
        self._now = _Found("")

    def collect(self, place: str, thing: Any) -> Own:
        """Never raises: a run must not suffer from what cannot be told."""
        self._now = found = _Found(place)
        self._teller.begin(place)
        told = None
        try:
            told = self._teller.told(thing)
        except Unknown as problem:
            found.unknown.append(str(problem))
        except Exception as problem:  # of the user's own properties, say
            found.unknown.append(f"{type(problem).__name__}: {problem}")
        inputs = dict(file for text in _texts(told) if (file := self._hashed(text)) is not None)
        parts: dict[str, Any] = {
            "told": told,
            "modules": sorted(found.modules.items()),
            "loose": found.loose.pieces,
            "facts": found.facts,
            "packages": sorted(found.packages),
            "read": sorted({file[1] for text in found.strings() if (file := self._hashed(text)) is not None}),
            "inputs": sorted(inputs.values()),
        }
        text = json.dumps(parts, separators=(",", ":"), default=repr)
        unknown = list(dict.fromkeys(found.unknown))
        return Own(told, hashlib.sha256(text.encode()).hexdigest(), found.sources(), inputs, unknown)

    def _follow(self, thing: Any) -> None:
        if isinstance(thing, ModuleType):
            self._module(thing.__name__)
            return
        module = thing.__globals__.get("__name__", "") if isinstance(thing, FunctionType) else thing.__module__
        home = home_of(module or "builtins")
        if id(thing) in self._now.visited or home in ("ours", "python"):
            return
        self._now.visited[id(thing)] = thing
        if home == "own" and isinstance(thing, type | FunctionType):
            self._module(module)
            self._check(thing, self._now.modules.get(module, ""))
        elif home == "loose" and isinstance(thing, type | FunctionType):
            self._loose(thing)
        elif home == "installed":
            self._module(module)
        else:
            raise Unknown(f"where {name_of(thing)} comes from")
        if isinstance(thing, type) and home != "installed":
            self._class(thing)

    def _class(self, owner: type) -> None:
        """What a class holds, whatever its source says: attributes may have been set since."""
        for base in (*owner.__mro__[1:-1], type(owner)):
            self._follow(base)
        for name, value in vars(owner).items():
            functions = unwrapped(value)
            hidden = name.startswith(("__", "_abc_")) or isinstance(value, MemberDescriptorType | GetSetDescriptorType)
            for part in functions or ([] if hidden else [value]):
                if not _is_generated(owner, part):
                    self._fact(f"{owner.__qualname__}.{name}", part)

    def _check(self, thing: type | FunctionType, text: str) -> None:
        functions = [thing] if isinstance(thing, FunctionType) else functions_of(thing)
        for function in functions:
            if function.__globals__.get("__name__") != thing.__module__ or _is_generated(thing, function):
                continue
            if not is_current(function, text):
                raise Unknown(
                    f"{thing.__module__}, which defines {thing.__qualname__}, was edited after it was imported"
                )

    def _fact(self, name: str, value: Any) -> None:
        try:
            self._now.facts.append([name, self._teller.told(value)])
        except Unknown as problem:
            self._now.unknown.append(f"{name}: {problem}")

    def _module(self, name: str) -> None:
        """A module of the user's own with all that it imports; of an installed one the version."""
        home, found = home_of(name), self._now
        if home == "installed":
            found.packages.add(version_of(name.partition(".")[0]))
        file = file_of(name)
        if home != "own" or file is None or file.is_dir() or name in found.modules:
            return
        if file.suffix != ".py":  # written in another language
            found.modules[name] = hashlib.sha256(file.read_bytes()).hexdigest()
            return
        text = found.modules[name] = text_of_file(str(file))
        found.files[name] = file
        if "." in name:
            self._module(name.rpartition(".")[0])
        for imported in imports_of(text, name):
            self._module(imported)
        live = sys.modules.get(name)
        if live is not None:
            self._globals(live, text)

    def _globals(self, module: ModuleType, text: str) -> None:
        """Values that functions of a module take from it. Those of its own may have been changed since the import."""
        values = vars(module)
        functions = [one for value in values.values() if _is_of(value, module) for one in _functions(value)]
        for name in dict.fromkeys(used for function in functions for used in globals_used(function.__code__)):
            value = values.get(name)
            if isinstance(value, ModuleType):
                self._module(value.__name__)
            elif value is not None:
                self._fact(f"{module.__name__}.{name}", value)

    def _loose(self, thing: type | FunctionType) -> None:
        """A definition of a notebook or script, after all that it refers to by name."""
        functions = [thing] if isinstance(thing, FunctionType) else functions_of(thing)
        functions = [function for function in functions if not _is_generated(thing, function)]
        self._now.visited.update((id(function), function) for function in functions)
        source = source_of_function(thing) if isinstance(thing, FunctionType) else source_of_class(thing)
        values = dict(vars(sys.modules[thing.__module__])) if thing.__module__ in sys.modules else {}
        for function in functions:
            values.update(function.__globals__)
        for function in functions:
            values.update(cells_of(function))
        loose = self._now.loose
        for name in globals_named(source):
            of_the_module = name.startswith("__") and name.endswith("__")  # such as __name__, which a class body reads
            if name in values and values[name] is not thing and not of_the_module:
                value = values[name]
                definition = isinstance(value, type | FunctionType) and home_of(_module_of(value)) == "loose"
                try:
                    loose.refer(name, value, self._teller.told(value), definition)
                except Unknown as problem:
                    self._now.unknown.append(f"{thing.__qualname__} uses {name}: {problem}")
        loose.define(name_of(thing), source)


@dataclass(slots=True)
class _Found:
    """What belongs to one place."""

    place: str
    modules: dict[str, str] = field(default_factory=dict[str, str])
    files: dict[str, Path] = field(default_factory=dict[str, Path])
    loose: Loose = field(default_factory=Loose)
    facts: list[Any] = field(default_factory=list[Any])
    packages: set[str] = field(default_factory=set[str])
    unknown: list[str] = field(default_factory=list[str])
    visited: dict[int, Any] = field(default_factory=dict[int, Any])

    def strings(self) -> set[str]:
        texts = [*self.modules.values(), *(source for _, source in self.loose.pieces)]
        return {string for text in texts for string in strings_of(text)}

    def sources(self) -> dict[str, str]:
        """The files to keep, such that the modules can be imported from there."""
        kept: dict[str, str] = {}
        for name, file in self.files.items():
            path = name.replace(".", "/")
            kept[f"{path}/__init__.py" if file.name == "__init__.py" else f"{path}.py"] = self.modules[name]
        if self.loose.pieces:
            kept[f"{main_module(self.place)}.py"] = self.loose.text()
        return kept


def main_module(place: str) -> str:
    """The module that keeps what a strategy took from a notebook or a script."""
    return "main_" + "".join(sign if sign.isalnum() else "_" for sign in place)


def _module_of(value: Any) -> str:
    return value.__globals__.get("__name__", "") if isinstance(value, FunctionType) else value.__module__


def _functions(value: Any) -> list[FunctionType]:
    return functions_of(value) if isinstance(value, type) else unwrapped(value)


def _is_of(value: Any, module: ModuleType) -> bool:
    return getattr(value, "__module__", None) == module.__name__


def _is_generated(owner: Any, function: Any) -> bool:
    """Whether `@dataclass` wrote it, from fields that are told anyway."""
    if not isinstance(function, FunctionType) or not dataclasses.is_dataclass(owner):
        return False
    name, code = function.__name__, function.__code__
    written = code.co_filename == "<string>" and code.co_qualname.startswith("__create_fn__")
    wrapped = function.__globals__.get("__name__") in ("reprlib", "dataclasses")
    return wrapped or (written and name.startswith("__") and name.endswith("__"))


def _texts(told: Any) -> list[str]:
    """Every text in a told value."""
    if isinstance(told, str):
        return [told]
    if isinstance(told, dict):
        return [text for part in cast("dict[str, Any]", told).values() for text in _texts(part)]
    return [text for part in cast("list[Any]", told) for text in _texts(part)] if isinstance(told, list) else []
