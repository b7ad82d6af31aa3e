"""Which runs are meant: `sched/prefill=random`, `ttft_s.p90<2`, `state=failed`, or a word found anywhere."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from mcjax.errors import ConfigError, RunError
from mcjax.track import sweep
from mcjax.track.flat import text_of
from mcjax.track.listing.entries import Entry
from mcjax.track.metrics import CATALOGUE

Test = Callable[[Entry], bool]

_WORD = re.compile(r"(?P<key>[^=<>!]+)(?P<sign>!=|<=|>=|=|<|>)(?P<value>.*)")
_SIGNS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
OWN_KEYS = ("state", "run", "key", "sweep", "backend")
"""What a run is called by, besides its config and its figures."""


def matching(found: Sequence[Entry], words: Sequence[str], base: Path) -> list[Entry]:
    """The runs that every word fits. Raises `ConfigError` for a key that no run has, or that stands for several."""
    for word in words:
        fits = _test(word, found, base)
        found = [entry for entry in found if fits(entry)]
    return list(found)


def _test(word: str, found: Sequence[Entry], base: Path) -> Test:
    parts = _WORD.fullmatch(word)
    if parts is None:
        return lambda entry: any(word in text for text in _texts(entry))
    key, sign, value = parts["key"].strip(), parts["sign"], parts["value"].strip()
    if sign in _SIGNS:
        return _comparison(key, sign, value, found)
    fits = _own(key, value, base) if key in OWN_KEYS else _equality(key, value, found)
    return fits if sign == "=" else lambda entry: not fits(entry)


def _own(key: str, value: str, base: Path) -> Test:
    if key == "sweep":
        points = _points(base / sweep.FOLDER / value)
        return lambda entry: entry.name in points or entry.record.sweep == value
    if key == "key":
        return lambda entry: entry.record.run_key.startswith(value)
    read: Mapping[str, Callable[[Entry], str]] = {
        "state": lambda entry: entry.state,
        "run": lambda entry: entry.name,
        "backend": lambda entry: entry.record.backend,
    }
    return lambda entry: _equal(read[key](entry), value)


def _points(directory: Path) -> set[str]:
    try:
        return {Path(point.directory).name for point in sweep.read(directory).points}
    except RunError:
        return set()


def _equality(key: str, value: str, found: Sequence[Entry]) -> Test:
    full = _full(key, found)

    def fits(entry: Entry) -> bool:
        own = entry.value(full)
        figure = entry.figure(full) if own is None else None
        return _equal(own, value) if own is not None else figure is not None and _equal(text_of(figure), value)

    return fits


def _comparison(key: str, sign: str, value: str, found: Sequence[Entry]) -> Test:
    number = _number(value)
    if number is None:
        raise ConfigError("filter", f"{key}{sign}{value}", "compares with a number")
    full, compare = _full(key, found), _SIGNS[sign]

    def fits(entry: Entry) -> bool:
        text = entry.value(full)
        own = entry.figure(full) if text is None else _number(text)
        return own is not None and compare(own, number)

    return fits


def _full(key: str, found: Sequence[Entry]) -> str:
    """The key that is meant: as it is, or the one that ends so (`prefill` is `sched/prefill`)."""
    if key in CATALOGUE or not found:
        return key
    known = {name: None for entry in found for names in (entry.record.choices, entry.record.config) for name in names}
    if key in known or any(entry.figure(key) is not None for entry in found):
        return key
    ends = [name for name in known if name.endswith((f"/{key}", f".{key}"))]
    groups = [name for name in ends if "/" in name]
    ends = groups if len(groups) == 1 else ends
    if len(ends) == 1:
        return ends[0]
    if ends:
        raise ConfigError("filter", key, "may be several keys", sorted(ends))
    close = difflib.get_close_matches(key, [*known, *CATALOGUE, *OWN_KEYS], 1)
    hint = f", did you mean {close[0]}?" if close else ""
    raise ConfigError("filter", key, f"is no config key, figure or group of any run here{hint}")


def _equal(own: str, value: str) -> bool:
    if own == value or ("*" in value and fnmatchcase(own, value)):
        return True
    mine, other = _number(own), _number(value)
    return mine is not None and mine == other


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _texts(entry: Entry) -> list[str]:
    own = entry.record
    values = [text_of(value) for value in own.config.values() if isinstance(value, str | list)]
    choices = [f"{group}={option}" for group, option in own.choices.items()]
    sources = [source.name for source in own.strategies.values()]
    return [entry.name, own.run_key, entry.state, entry.note, own.sweep, *own.argv, *choices, *sources, *values]
