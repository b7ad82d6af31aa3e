"""Strategies of the caller's own on their way to other processes, and lists of them as something to sweep over."""

from __future__ import annotations

import importlib
import io
import itertools
import linecache
import marshal
import os
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, cast

from mcjax.app.plugins import Plugins
from mcjax.app.provenance import own_code_given
from mcjax.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Given:
    """One combination of strategies: what it is called (`prefill=Mine`), and itself, pickled (empty: none)."""

    words: tuple[str, ...] = ()
    pickled: bytes = b""


@dataclass(frozen=True, slots=True)
class _Parcel:
    """`cells` is the text of a notebook's: an error in one shows its line."""

    plugins: Plugins
    cells: Mapping[str, list[str]]


def combinations(strategies: Mapping[str, Any]) -> list[Given]:
    """Every combination of the strategies; where one is a list (or tuple), one member each time, the last fastest.

    Raises `ConfigError` for what is no strategy, and for what cannot be sent to another process.
    """
    if not strategies:
        return [Given()]
    choices = {place: _choices(place, value) for place, value in strategies.items()}
    cells = _cells()
    found: list[Given] = []
    for combination in itertools.product(*choices.values()):
        named = dict(zip(choices, combination, strict=True))
        plugins = Plugins({place: strategy for place, (_, strategy) in named.items()})
        words = tuple(f"{place}={name}" for place, (name, _) in named.items())
        plugins.collected = own_code_given(plugins)
        found.append(Given(words, _pickled(words, _Parcel(plugins, cells))))
    return found


def unpacked(pickled: bytes) -> Plugins:
    """The strategies, made again in a worker. Raises `ConfigError`."""
    if not pickled:
        return Plugins({})
    try:
        parcel: _Parcel = pickle.loads(pickled)
    except Exception as problem:
        what = f"cannot be made again in another process: {type(problem).__name__}: {problem}"
        raise ConfigError("strategies", "given", what) from problem
    for name, lines in parcel.cells.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    return parcel.plugins


def _choices(place: str, value: Any) -> list[tuple[str, Any]]:
    """The members with their names; those of one name are told apart by a number."""
    options = list(cast("Iterable[Any]", value)) if isinstance(value, list | tuple) else [value]
    if not options:
        raise ConfigError(place, "[]", "there is nothing to sweep over")
    names = [str(getattr(option, "__name__", type(option).__name__)) for option in options]
    numbered = [
        f"{name}#{names[: index + 1].count(name)}" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]
    return list(zip(numbered, options, strict=True))


def _cells() -> dict[str, list[str]]:
    """The text of code that stands in no file."""
    return {
        name: list(entry[2]) for name, entry in linecache.cache.items() if len(entry) == 4 and not os.path.exists(name)
    }


def _pickled(words: tuple[str, ...], parcel: _Parcel) -> bytes:
    try:
        return _dumped(parcel)
    except Exception as problem:
        place, _, name = words[0].partition("=")
        what = f"cannot be sent to another process, as a sweep does: {type(problem).__name__}: {problem}"
        raise ConfigError(
            place if len(words) == 1 else "strategies", name if len(words) == 1 else words, what
        ) from None


def _dumped(value: Any) -> bytes:
    """Pickled, with classes of a notebook, and functions within functions."""
    plain: Any = importlib.import_module("cloudpickle").Pickler

    class Pickler(plain):
        """Leaves code as it is: newer versions of cloudpickle forget which file it comes from, and with it its source.
        Whoever reads this is of the same Python."""

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, CodeType):
                return marshal.loads, (marshal.dumps(obj),)
            return plain.reducer_override(self, obj)

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()
