"""Where a run comes from: what it was asked for, what it is made of, and what tells it from every other."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import mcjax
from mcjax.app.inputs import Inputs, hashed, inputs_of
from mcjax.app.mistakes import locate
from mcjax.app.own_code.collect import Collector, Own, main_module
from mcjax.app.own_code.homes import home_of
from mcjax.app.plugins import PLACES, Plugins
from mcjax.track.flat import flat
from mcjax.track.identity import run_key
from mcjax.track.record import RunRecord, StrategySource
from mcjax.track.run_directory import now


@dataclass(frozen=True, slots=True)
class Origin:
    """Who asked for a run: the words that were typed, the options that they chose, and the sweep it belongs to."""

    argv: Sequence[str] = ()
    choices: Mapping[str, str] = field(default_factory=dict[str, str])
    sweep: str = ""


@dataclass(frozen=True, slots=True)
class Provenance:
    """The record of a run that starts now, and the user's own code to keep with it."""

    record: RunRecord
    sources: Mapping[str, str]

    def with_inputs(self, inputs: Mapping[str, str]) -> Provenance:
        """The same, with what the workload says that it has read. A file that changed meanwhile has no key."""
        own = self.record
        changed = [path for path, sha256 in inputs.items() if own.inputs.get(path, sha256) != sha256]
        record = replace(own, inputs={**own.inputs, **inputs})
        if changed:
            record = replace(record, run_key="", unkeyed=f"{changed[0]} changed while it was read")
        return replace(self, record=record)


def provenance(plain: Mapping[str, Any], plugins: Plugins, origin: Origin) -> Provenance:
    """What is known of a run before anything of it is made. `plain` is its resolved config."""
    found = inputs_of(plain)
    own, names = _own_code(plain, plugins)
    unknown = [f"{place}: {problem}" for place, code in own.items() for problem in code.unknown]
    sources = {name: text for code in own.values() for name, text in code.sources.items()}
    given = plugins.names()
    sources |= {f"{place}.json": _called(place, names[place], code) for place, code in own.items() if place in given}
    record = RunRecord(
        run_key="" if unknown else _key(plain, found, own),
        unkeyed="; ".join(unknown),
        started=now(),
        backend=plain["backend"]["name"],
        argv=tuple(origin.argv),
        sweep=origin.sweep,
        choices=dict(origin.choices),
        config=flat(plain),
        code=code_tree(),
        inputs={**found.by_path, **{path: sha for code in own.values() for path, sha in code.inputs.items()}},
        strategies={
            place: StrategySource(names[place], code.sha256, _files(place, code, place in given))
            for place, code in own.items()
        },
    )
    return Provenance(record, sources)


@functools.cache
def code_tree() -> str:
    """sha256 of every file of the installed package, by name: the same wherever it lies, with git or without."""
    root = Path(mcjax.__file__).parent
    files = sorted(
        file for file in root.rglob("*") if "__pycache__" not in file.parts and file.suffix != ".pyc" and file.is_file()
    )
    tree = hashlib.sha256()
    for file in files:
        name, held = file.relative_to(root).as_posix().encode(), file.read_bytes()
        tree.update(b"%d %s %d\n" % (len(name), name, len(held)))
        tree.update(held)
    return tree.hexdigest()


def _key(plain: Mapping[str, Any], found: Inputs, own: Mapping[str, Own]) -> str:
    strategies = {place: code.sha256 for place, code in own.items()}
    return run_key(plain, code=code_tree(), inputs=found.by_key, strategies=strategies)


def _own_code(plain: Mapping[str, Any], plugins: Plugins) -> tuple[dict[str, Own], dict[str, str]]:
    """Code of the user's own and what it was called: by place if it was given, by config key if the config names it.

    A target of another installed package counts as own code: its version is part of what it is.
    """
    collector = Collector(hashed)
    found: dict[str, Own] = {}
    names: dict[str, str] = {}
    for place, (name, code) in (plugins.collected or own_code_given(plugins, collector)).items():
        found[place], names[place] = code, name
    covered = tuple(PLACES[place][0] + "." for place in found)
    for key, target in _targets(plain, ""):
        if key.startswith(covered) or home_of(target.rpartition(".")[0]) in ("ours", "python"):
            continue
        place = key.removesuffix("._target_")
        place = next((name for name, (section, _) in PLACES.items() if section == place), place)
        found[place], names[place] = collector.collect(place, locate(key, target)), target
    return found, names


def own_code_given(plugins: Plugins, collector: Collector | None = None) -> dict[str, tuple[str, Own]]:
    """By place, what the strategies that were given are called and made of. Some of it (decorators, the cells of a
    notebook) is within reach only in the process where they were defined."""
    teller = collector or Collector(hashed)
    given = {place: plugins.original(place) for place in PLACES}
    return {place: (shown(one), teller.collect(place, one)) for place, one in given.items() if one is not None}


def _targets(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Every `_target_` with its key; those of sinks change no row."""
    if isinstance(value, Mapping):
        for name, item in cast("Mapping[str, Any]", value).items():
            at = f"{key}.{name}" if key else str(name)
            if name == "_target_" and isinstance(item, str) and "." in item and item != "???":
                yield at, item
            elif at != "track":
                yield from _targets(item, at)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(cast("list[Any]", value)):
            yield from _targets(item, f"{key}[{index}]")


def shown(given: Any) -> str:
    """A strategy as its caller would write it: `Mine(alpha=2)`."""
    name = getattr(given, "__name__", None)
    if name is not None:
        return str(name)
    values = cast("dict[str, Any]", getattr(given, "__dict__", {})).items()
    inside = ", ".join(f"{name}={value!r}" for name, value in values if isinstance(value, bool | int | float | str))
    return f"{type(given).__name__}({inside if len(inside) <= 80 else '...'})"


def _files(place: str, code: Own, given: bool) -> tuple[str, ...]:
    return tuple(f"strategies/{name}" for name in sorted([*code.sources, *([f"{place}.json"] if given else [])]))


def _called(place: str, name: str, code: Own) -> str:
    """How a strategy that was given from Python is made again: `mcjax rerun` reads it."""
    values = {"name": name, "made": code.told, "main": main_module(place), "unknown": code.unknown}
    return json.dumps(values, indent=1) + "\n"
