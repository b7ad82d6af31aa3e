"""Holds a whole config against what is declared of it, before anything is made from it."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from mcjax.app.mistakes import check_arguments, close_to, locate
from mcjax.app.plugins import PLACES
from mcjax.app.schema.kinds import described, fits, form_of, takes_null
from mcjax.app.schema.sections import BY_NAME, MADE, PARTS, SECTIONS, Root
from mcjax.app.schema.together import check_together
from mcjax.errors import ConfigError
from mcjax.kernels.choice import PARAMETERS
from mcjax.track.flat import text_of

MISSING = "???"
"""What OmegaConf has for a value that must be given."""

UNMADE = ("backend", "kernels")
"""Sections whose objects are no strategies, made from their keys when the config is read."""


def check(config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for the first value of a wrong kind, and for values that exclude each other.

    `config` is plain and whole. What an error in the user's own module raises passes through.
    """
    check_kinds(config)
    check_together(config)


def check_kinds(config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for the first value that is not of the kind that its key is declared to be."""
    known = (*SECTIONS, *BY_NAME, *MADE)
    _check_section("", Root, {name: value for name, value in config.items() if name not in (*known, "plugins")}, known)
    for key in known:
        if not isinstance(config.get(key), Mapping):
            raise ConfigError(key, text_of(config.get(key)), f"must be one of the group's options ({key}=OPTION)")
    for key, kind in SECTIONS.items():
        _check_section(key, kind, config[key])
    for key, kinds in BY_NAME.items():
        name = config[key].get("name")
        if not isinstance(name, str) or name not in kinds:
            raise ConfigError(f"{key}.name", text_of(name), f"there is no such {key}", kinds)
        _check_section(key, kinds[name], config[key])
    for key in (*MADE, *(place for place, _ in PLACES.values())):
        section = _at(config, key)
        if not isinstance(section, Mapping) or "_target_" not in section:
            problem = f"must be one of the group's options ({key.replace('.', '/')}=OPTION)"
            raise ConfigError(key, text_of(section), problem)
    for key, section in _objects("", {name: value for name, value in config.items() if name not in UNMADE}):
        _check_object(key, section)
    for name, value in config["kernels"].items():
        if isinstance(value, Mapping):
            _check_kernel(f"kernels.{name}", cast("Mapping[str, Any]", value))


@functools.cache
def kinds_of(section: type) -> dict[str, Any]:
    """The kind of each key of a declared section."""
    return typing.get_type_hints(section, include_extras=True)


def check_value(key: str, value: Any, kind: Any) -> None:
    """Raise `ConfigError` for a value that is not of the kind."""
    form = form_of(kind)
    if value is None and not takes_null(kind):
        raise ConfigError(key, "null", f"needs a value: {described(kind)}")
    if form is not None and value is not None:
        form.read(key, value)
    elif not fits(value, kind):
        raise ConfigError(key, text_of(value), f"must be {described(kind)}")


def _check_section(
    key: str, section: type, values: Mapping[str, Any], others: Iterable[str] = (), whole: bool = True
) -> None:
    kinds, prefix = kinds_of(section), f"{key}." if key else ""
    for name, value in values.items():
        if f"{prefix}{name}" in _CHOSEN or name.startswith("_"):
            continue
        if name not in kinds:
            names = [
                *kinds,
                *(chosen.removeprefix(prefix) for chosen in _CHOSEN if prefix and chosen.startswith(prefix)),
            ]
            problem = f"there is no such key{close_to(name, [*names, *others])}"
            raise ConfigError(f"{prefix}{name}", text_of(value), problem, names)
        check_value(f"{prefix}{name}", value, kinds[name])
    for name in kinds:
        if whole and name not in values:
            raise ConfigError(f"{prefix}{name}", "", f"needs a value: {described(kinds[name])}")


def _check_object(key: str, section: Mapping[str, Any]) -> None:
    if section["_target_"] == MISSING:
        raise ConfigError(f"{key}._target_", "", "must be given, such as my_policy.Mine")
    target = locate(f"{key}._target_", section["_target_"])
    arguments = {name: value for name, value in section.items() if not name.startswith("_") and value != MISSING}
    check_arguments(key, target, arguments, partial=section.get("_partial_", False))
    for name, kind in PARTS.get(section["_target_"], {}).items():
        if isinstance(arguments.get(name), Mapping):
            _check_section(f"{key}.{name}", kind, arguments[name], whole=False)


def _check_kernel(key: str, section: Mapping[str, Any]) -> None:
    """The user's own kernel: a function that is called as a kernel is, or a class whose objects are (and may be made
    from the section's other keys)."""
    if not isinstance(section.get("_target_"), str):
        raise ConfigError(key, text_of(section), "needs a _target_, such as {_target_: my_kernels.attention}")
    target = locate(f"{key}._target_", section["_target_"])
    arguments = {name: value for name, value in section.items() if not name.startswith("_")}
    check_arguments(key, target, arguments, partial=not isinstance(target, type))
    if key == "kernels.kv_pack":
        lacking = [name for name in ("pack", "unpack") if not callable(getattr(target, name, None))]
        if lacking or not isinstance(target, type):
            raise ConfigError(key, section["_target_"], "must be a class with the methods pack and unpack")
        return
    called, given = (target.__call__, (None,)) if isinstance(target, type) else (target, ())
    try:
        inspect.signature(called).bind(*given, *PARAMETERS, **({} if given else arguments))
    except ValueError:  # written in C
        return
    except TypeError as problem:
        raise ConfigError(key, section["_target_"], f"must take ({', '.join(PARAMETERS)}): {problem}") from None


def _objects(key: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every section with a `_target_`, by key, outer ones first."""
    if isinstance(value, Mapping):
        section = cast("Mapping[str, Any]", value)
        if "_target_" in section:
            yield key, section
        for name, inner in section.items():
            yield from _objects(f"{key}.{name}" if key else str(name), inner)
    elif isinstance(value, list):
        for index, inner in enumerate(cast("list[Any]", value)):
            yield from _objects(f"{key}[{index}]", inner)


def _at(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = cast("Mapping[str, Any]", value).get(part) if isinstance(value, Mapping) else None
    return value


_CHOSEN = tuple(place for place, _ in PLACES.values() if "." in place)
"""Keys of a declared section that are groups of their own."""
