"""`run.json`: what identifies a run and its headline figures, small enough that thousands are read in a second."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from mcjax.errors import RunError
from mcjax.track.flat import flat
from mcjax.track.levels import FULL, as_named_now

FILE = "run.json"
VERSION = 1


@dataclass(frozen=True, slots=True)
class StrategySource:
    """Code of the user's own that a run used: what it was called, where it is kept, and its hash."""

    name: str
    """As the config or the caller named it: `my_policy.Mine`, or `Mine(alpha=2)` for an object."""
    sha256: str
    """Of the source and of everything of the user's own that it uses."""
    files: tuple[str, ...] = ()
    """The kept source, relative to the run directory."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What is known of a run when it starts, and how it ended. `config` is flat, resolved, and free of secrets."""

    run_key: str = ""
    """Equal keys, equal rows (of virtual runs): sha256 over config, code, strategies and inputs; "" if it has none."""
    unkeyed: str = ""
    """Why it has none: what could not be told of the user's own code."""
    started: str = ""
    backend: str = ""
    argv: tuple[str, ...] = ()
    sweep: str = ""
    """The sweep that asked for it first."""
    choices: Mapping[str, str] = field(default_factory=dict[str, str])
    """The option of each config group: `{"sched/prefill": "random"}`."""
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    code: str = ""
    """sha256 of the package's own files."""
    inputs: Mapping[str, str] = field(default_factory=dict[str, str])
    """Path of each input file, and its sha256."""
    strategies: Mapping[str, StrategySource] = field(default_factory=dict[str, StrategySource])
    """By place (`prefill`, `eviction`): the user's own code."""
    ended: str = ""
    headline: Mapping[str, float | None] = field(default_factory=dict[str, "float | None"])
    """The figures of `mcjax.track.metrics.HEADLINE`, once there are any."""
    digest: str = ""
    level: str = FULL
    """How much of it is kept (`mcjax.track.levels`), once it has ended."""
    cut: str = ""
    """Why that is less than was asked for."""

    def text(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":"), default=str) + "\n"


_FIELDS = tuple(field_.name for field_ in fields(RunRecord))


def read(directory: Path) -> RunRecord:
    """The record of a run directory; of one from before there were records, what its other files say.

    Raises `RunError` if it is damaged.
    """
    try:
        with open(f"{directory}/{FILE}", "rb") as file:
            values = json.loads(file.read())
    except FileNotFoundError:
        return _from_other_files(directory)
    except (OSError, ValueError) as problem:
        raise RunError(f"{directory}: {FILE} is damaged ({problem})") from problem
    return of(values, directory)


def of(values: Any, directory: Path) -> RunRecord:
    """A record from its JSON. Raises `RunError`."""
    if not isinstance(values, dict) or "version" not in values:
        raise RunError(f"{directory}: {FILE} is damaged (no record)")
    found = cast("dict[str, Any]", values)
    if found["version"] > VERSION:
        raise RunError(f"{directory}: {FILE} has version {found['version']}, this mcjax reads up to {VERSION}")
    known = {name: found[name] for name in _FIELDS if name in found}
    try:
        known["argv"] = tuple(known.get("argv", ()))
        known["strategies"] = {
            place: StrategySource(source["name"], source["sha256"], tuple(source["files"]))
            for place, source in known.get("strategies", {}).items()
        }
    except (TypeError, KeyError, AttributeError) as problem:
        raise RunError(f"{directory}: {FILE} is damaged ({problem!r})") from problem
    return RunRecord(**known)


def _from_other_files(directory: Path) -> RunRecord:
    import yaml

    def text(name: str) -> str:
        path = directory / name
        return path.read_text(encoding="utf-8") if path.exists() else ""

    try:
        config: dict[str, Any] = yaml.safe_load(text("config.yaml")) or {}
        environment = json.loads(text("environment.json") or "{}")
        argv = tuple(environment.get("argv", ()))
        values = flat(config)
        level = as_named_now(str(values.get("track.level", FULL)))
        return RunRecord(backend=str(values.get("backend.name", "")), argv=argv, config=values, level=level)
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as problem:
        raise RunError(f"{directory}: no {FILE}, and its other files are damaged ({problem})") from problem
