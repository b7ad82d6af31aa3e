"""Mistakes, told so that a person can mend them: wrong types, names that lead nowhere, and errors in their own code."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import sysconfig
import traceback
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mcjax.app.schema.kinds import described, fits
from mcjax.errors import ConfigError
from mcjax.track.flat import text_of


def close_to(word: str, words: Iterable[str]) -> str:
    """`, did you mean X`, or nothing."""
    found = difflib.get_close_matches(word, list(words), 1)
    return f", did you mean {found[0]}" if found else ""


def locate(key: str, path: str) -> Any:
    """The object that a dotted path names. Raises `ConfigError` naming `key`; what its module raises passes through."""
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ConfigError(key, path, "must be MODULE.NAME, such as my_policy.Mine")
    for count in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:count])
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as problem:
            if problem.name is None or not f"{name}.".startswith(f"{problem.name}."):
                raise  # the module is there, and imports something that is not
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                own = [word for word in vars(found) if not word.startswith("_")]
                raise ConfigError(key, path, f"{name} has no {part}{close_to(part, own)}")
            found = getattr(found, part)
        return found
    raise ConfigError(key, path, f"there is no module {parts[0]}, neither installed nor in the working directory")


@functools.cache
def parameters_of(target: Callable[..., Any]) -> tuple[Mapping[str, inspect.Parameter], Mapping[str, Any]]:
    """What a class or function takes, and the annotations by name, read once."""
    hints = typing.get_type_hints(target.__init__ if isinstance(target, type) else target, include_extras=True)
    return inspect.signature(target).parameters, hints


def check_arguments(key: str, target: Callable[..., Any], values: Mapping[str, Any], partial: bool = False) -> None:
    """Raise `ConfigError` for values that `target` does not take, needs and does not get, or has declared otherwise."""
    try:
        parameters, hints = parameters_of(target)
    except (TypeError, ValueError, NameError):  # written in C, or its annotations are not there at run time
        return
    named = [name for name, found in parameters.items() if found.kind not in (found.VAR_POSITIONAL, found.VAR_KEYWORD)]
    takes_any = any(found.kind is found.VAR_KEYWORD for found in parameters.values())
    for name, value in values.items():
        if name not in named and not takes_any:
            what = f"{getattr(target, '__name__', target)} takes no {name}{close_to(name, named)}"
            raise ConfigError(f"{key}.{name}", value, what, named)
        if not fits(value, hints.get(name, Any)):
            raise ConfigError(f"{key}.{name}", text_of(value), f"must be {described(hints[name])}")
    missing = [name for name in named if parameters[name].default is inspect.Parameter.empty and name not in values]
    if missing and not partial:
        raise ConfigError(f"{key}.{missing[0]}", "", f"{getattr(target, '__name__', target)} needs a value for it")


def own_traceback(problem: BaseException) -> str:
    """The traceback from the first line of the user's own code on, or nothing if none of it was running.

    Own is what lies neither in this package, nor in the standard library, nor among installed packages.
    """
    here = str(Path(__file__).parents[1])
    others = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    frames = problem.__traceback__
    while frames is not None:
        file = frames.tb_frame.f_code.co_filename
        if not file.startswith((here, "<frozen", *others)):
            return "".join(traceback.format_exception(type(problem), problem, frames, chain=False)).rstrip()
        frames = frames.tb_next
    return ""
