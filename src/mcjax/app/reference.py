"""What a config may say, for people: each group with its options, each option with its keys, as they are declared.

Defaults and words are those of the files in `conf/`; what a key takes is what `schema` holds it against.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcjax.app.mistakes import close_to, locate, parameters_of
from mcjax.app.schema.check import kinds_of
from mcjax.app.schema.files import ROOT, ConfFile, Group, Key, groups, read
from mcjax.app.schema.kinds import described
from mcjax.app.schema.sections import BY_NAME, PARTS, SECTIONS, Root
from mcjax.errors import ConfigError

KEYS = ("key", "default", "takes", "what it is")
OPTIONS = ("option", "", "what it is")

ROOT_WORD = "root"
"""What the command line calls the keys beside the groups."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of the reference: what it is about, and a table, one line each."""

    title: str
    about: str
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def overview() -> list[Part]:
    """All groups with their options."""
    return [_options_of(group) for group in groups().values()]


def everything() -> list[Part]:
    """Every key there is: of the root, then of each option of each group."""
    parts = root()
    for group in groups().values():
        parts.append(_options_of(group))
        parts += [part for part in (option(group, name) for name in group.options) if part.rows]
    return parts


def chosen(word: str) -> list[Part]:
    """What a word names: a group (`sched/prefill`), an option (`workload=synthetic`), `root`, or a section of it.

    Raises `ConfigError` that names the closest words.
    """
    name = word.replace(".", "/").replace("=", "/").strip("/")
    found = groups()
    if name in found:
        return [_options_of(found[name]), *(part for part in _each(found[name]) if part.rows)]
    group, _, last = name.rpartition("/")
    if group in found and last in found[group].options:
        return [option(found[group], last)]
    if group in found and not close_to(name, [other for other in found if other.startswith(f"{group}/")]):
        names = list(found[group].options)
        raise ConfigError("config", word, f"{group} has no option {last}{close_to(last, names)}", names)
    if name == ROOT_WORD:
        return root()
    sections = [part for part in root() if part.title == name]
    if sections:
        return sections
    names = [*found, ROOT_WORD, *(part.title for part in root()[1:])]
    raise ConfigError("config", word, f"there is no such group or section{close_to(name, names)}", names)


def root() -> list[Part]:
    """The keys beside the groups: those on their own, then each section."""
    file = read(ROOT)
    heads = {key.path: key.comment for key in file.keys if not key.value}
    parts = [Part(ROOT_WORD, "Keys beside the groups.", KEYS, _rows("", Root, file, ""))]
    for section in (name for name in heads if "." not in name):
        kind = SECTIONS.get(section)
        parts.append(Part(section, _sentence(heads[section]), KEYS, _rows("", kind, file, section)))
    return parts


def option(group: Group, name: str) -> Part:
    """One option and its keys."""
    file = group.options[name]
    is_default = " (default)" if name == group.default else ""
    return Part(f"{group.name}={name}{is_default}", file.about, KEYS, _option_rows(group, name, file))


def _each(group: Group) -> list[Part]:
    return [option(group, name) for name in group.options]


def _options_of(group: Group) -> Part:
    rows = [
        (name, "default" if name == group.default else "", file.about)
        for name, file in sorted(group.options.items(), key=lambda entry: entry[0] == "custom")
    ]
    return Part(group.name, _sentence(group.about), OPTIONS, rows)


def _option_rows(group: Group, name: str, file: ConfFile) -> list[tuple[str, str, str, str]]:
    section = BY_NAME[group.name][name] if group.name in BY_NAME else SECTIONS.get(group.key)
    return _rows(group.key, section, file, None)


def _rows(prefix: str, section: type | None, file: ConfFile, inside: str | None) -> list[tuple[str, str, str, str]]:
    """A line for each key: all of a file (`inside` None), those on their own (""), or those inside of one."""
    targets = {key.path.removesuffix("_target_"): key.value for key in file.keys if key.path.endswith("_target_")}
    rows: list[tuple[str, str, str, str]] = []
    for key in file.keys:
        outer, _, name = key.path.rpartition(".")
        if not _is_shown(key) or not _lies(key, inside):
            continue
        path = f"{prefix}.{key.path}" if prefix else key.path
        takes = _takes(outer if inside != outer else "", name, section, targets)
        rows.append((path, key.value, takes, f"{key.comment} ({key.note})" if key.note else key.comment))
    return rows


def _lies(key: Key, inside: str | None) -> bool:
    """Whether a key of the root is one of the section `inside`, or (where that is "") of none."""
    if inside is None:
        return True
    return key.path.startswith(f"{inside}.") if inside else "." not in key.path and bool(key.value)


def _is_shown(key: Key) -> bool:
    """What makes a section is no key to set, unless it must be given."""
    name = key.path.rpartition(".")[2]
    return key.value == "???" or (name not in ("_target_", "_partial_") and bool(key.value or key.comment))


def _takes(outer: str, name: str, section: type | None, targets: Mapping[str, str]) -> str:
    """The kind of a key in words, where it is declared."""
    kinds: Mapping[str, Any] = {}
    if section is not None and not outer:
        kinds = kinds_of(section)
    elif f"{outer}." in targets or (not outer and "" in targets):
        kinds = _declared(targets[f"{outer}." if outer else ""])
    elif outer in PARTS.get(targets.get("", ""), {}):
        kinds = kinds_of(PARTS[targets[""]][outer])
    kind = kinds.get(name, Any)
    return "" if kind in (Any, object) else described(kind)


def _declared(target: str) -> Mapping[str, Any]:
    return {} if target == "???" else parameters_of(locate("_target_", target))[1]


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}." if words else ""
