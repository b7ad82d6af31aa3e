"""The files of `conf/` as their reader sees them: groups, options, and each key with its default and its comment."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, cast

import yaml

ROOT = "config"
"""The file of the defaults and of the keys beside the groups."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a file: its dotted path there, its default as written, and what is said of it.

    `note` is what stands above it, where something stands beside it too.
    """

    path: str
    value: str
    comment: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class ConfFile:
    """What a file says of itself, its keys, and what its defaults list picks (`{"backend": ("jax", comment)}`)."""

    about: str
    keys: Sequence[Key]
    picks: Mapping[str, tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Group:
    """A folder: what it is for, the option that is taken unless another is named, and all options by name."""

    name: str
    about: str
    default: str
    options: Mapping[str, ConfFile]

    @property
    def key(self) -> str:
        """Where the config has it; "" for experiments, which lie over the whole."""
        return "" if self.name == "experiment" else self.name.replace("/", ".")


@functools.cache
def read(option: str) -> ConfFile:
    """The file of an option (`backend/sim`), or `ROOT`. Raises `FileNotFoundError`."""
    return parse(_folder().joinpath(f"{option}.yaml").read_text(encoding="utf-8"))


@functools.cache
def groups() -> Mapping[str, Group]:
    """All groups, in the order of the root's defaults; those that it does not list, last."""
    picks = read(ROOT).picks
    found = dict(_groups_in(_folder(), ""))
    names = [*(name for name in picks if name in found), *(name for name in found if name not in picks)]
    return {
        name: Group(
            name,
            picks.get(name, ("", ""))[1],
            picks.get(name, ("", ""))[0],
            {option: read(f"{name}/{option}") for option in found[name]},
        )
        for name in names
    }


def default_of(option: str, key: str) -> Any:
    """The value of a top-level key in the file of an option, as YAML has it."""
    return _values(option)[key]


def section_of(option: str) -> dict[str, Any]:
    """What the file of an option (`kvpool/eviction/lru`) holds, as YAML has it."""
    return dict(_values(option))


def parse(text: str) -> ConfFile:
    """Read the comments of a file: its head describes it; each key's stand beside it, or in the lines above."""
    lines = text.splitlines()
    head = list(_head(lines))
    keys: list[Key] = []
    picks: dict[str, tuple[str, str]] = {}
    above: list[str] = []
    outer: list[tuple[int, str]] = []  # the keys that the line lies inside of, and how far each is indented
    for line in lines[len(head) :]:
        content, comment = _split(line)
        if not content:
            above = [*above, comment] if comment else []
            continue
        indent, content, item = _indentation(content)
        outer = [(depth, name) for depth, name in outer if depth < indent - item]
        inside = [name for _, name in outer]
        if item:
            if inside == ["defaults"]:
                group, _, option = content.partition(":")
                picks[group.strip().removeprefix("override ").strip("/")] = (option.strip(), comment)
                above = []
                continue
            count = sum(key.path.startswith(f"{'.'.join(inside)}.") and key.path.endswith("._target_") for key in keys)
            outer.append((indent - 1, str(count)))
            inside.append(str(count))
        name, _, value = content.partition(":")
        outer.append((indent, name.strip()))
        if name.strip() != "defaults":
            said = " ".join(above)
            path = ".".join([*inside, name.strip()])
            keys.append(Key(path, value.strip(), comment or said, said if comment else ""))
        above = []
    about = " ".join(line.lstrip("#").strip() for line in head if not line.startswith("# @package"))
    return ConfFile(about, keys, picks)


def _head(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("#"):
            return
        yield line


def _split(line: str) -> tuple[str, str]:
    """A line without its comment, and the comment."""
    found = re.search(r"(?:^|\s)#\s?(.*)$", line)
    return (line, "") if found is None else (line[: found.start()].rstrip(), found.group(1).strip())


def _indentation(content: str) -> tuple[int, str, bool]:
    """How far the key is indented, the line from there on, and whether it is the first of a list's item."""
    indent = len(content) - len(content.lstrip())
    content = content.lstrip()
    if content.startswith("- "):
        return indent + 2, content[2:], True
    return indent, content, False


def _groups_in(folder: Traversable, prefix: str) -> Iterator[tuple[str, list[str]]]:
    entries = sorted(folder.iterdir(), key=lambda entry: entry.name)
    options = [entry.name.removesuffix(".yaml") for entry in entries if entry.name.endswith(".yaml")]
    if prefix and options:
        yield prefix, options
    for entry in entries:
        if entry.is_dir() and not entry.name.startswith("_"):
            yield from _groups_in(entry, f"{prefix}/{entry.name}" if prefix else entry.name)


def _folder() -> Traversable:
    return resources.files("mcjax.conf")


@functools.cache
def _values(option: str) -> Mapping[str, Any]:
    text = _folder().joinpath(f"{option}.yaml").read_text(encoding="utf-8")
    return cast("Mapping[str, Any]", yaml.safe_load(text))
