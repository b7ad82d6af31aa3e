"""The runs of a folder, each with its record and how it stands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import compress
from operator import ne
from pathlib import Path
from typing import Any, cast

from mcjax.errors import RunError
from mcjax.track import find, record
from mcjax.track.flat import text_of
from mcjax.track.groups import PAIRED, differing_keys
from mcjax.track.metrics import figures
from mcjax.track.record import RunRecord
from mcjax.track.state import state_of

OWN_CODE = " (own code)"


@dataclass(slots=True)
class Entry:
    """A run as a list shows it. `note` says why it failed, who runs it, or what is damaged."""

    directory: Path
    record: RunRecord
    state: str
    note: str = ""
    _figures: Mapping[str, float] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def started_s(self) -> float:
        """Seconds since 1970; 0 where it is not known."""
        try:
            return datetime.fromisoformat(self.record.started).timestamp()
        except ValueError:
            return 0.0

    def figure(self, name: str) -> float | None:
        """A figure of the run by its name; beyond the headline ones the summary is read."""
        if name in self.record.headline:
            return self.record.headline[name]
        if self._figures is None:
            try:
                summary: Any = json.loads((self.directory / "summary.json").read_bytes())
            except (OSError, ValueError):
                summary = {}
            self._figures = figures(cast("Mapping[str, Any]", summary)) if isinstance(summary, Mapping) else {}
        return self._figures.get(name)

    def value(self, key: str) -> str | None:
        """What a choice or config key is, as the command line writes it."""
        own = self.record
        if key in own.choices:
            return own.choices[key]
        if key in own.config:
            return text_of(own.config[key])
        source = own.strategies.get(key.removesuffix(OWN_CODE)) if key.endswith(OWN_CODE) else None
        return f"{source.name} {source.sha256[:8]}" if source else None


def entries(base: Path) -> list[Entry]:
    """Every run below `base`, the newest last."""
    found: list[Entry] = []
    for directory in find.directories(base):
        state, note = state_of(directory)
        if not state:
            continue
        try:
            found.append(Entry(directory, record.read(directory), state, note))
        except RunError as problem:
            found.append(Entry(directory, RunRecord(), "damaged", str(problem)))
    found.sort(key=lambda entry: (entry.started_s, entry.name))
    return found


def differing(listed: Sequence[Entry]) -> list[str]:
    """The keys whose values differ among the runs: as `groups.differing_keys` has it, and seed and slice."""
    records = [entry.record for entry in listed if entry.record.config]
    if not records:
        return []
    varying = _varying([record.config for record in records])
    paired = [key for key in PAIRED if key in varying]
    if "seed" in varying:  # what follows the run's own seed is left out, and what does not is no constant then
        varying += [key for key in records[0].config if key.endswith(".seed") and key not in varying]
    choices = _varying([record.choices for record in records])
    return [*differing_keys(_slim(records, choices, ["seed", *varying])), *paired]


def _varying(sections: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys that are not the same in every section. Of the 150 of a config few are: the rest is left out early."""
    layouts: dict[tuple[str, ...], tuple[Any, ...]] = {}
    found: set[str] = set()
    for section in sections:  # with as little Python a key as possible: there are thousands of them
        keys, values = tuple(section), tuple(section.values())
        first = layouts.setdefault(keys, values)
        if first is not values:
            found.update(compress(keys, map(ne, values, first)))
    known, *others = [dict(zip(keys, values, strict=True)) for keys, values in layouts.items()]
    for other in others:
        found.update(known.keys() ^ other.keys())
        found.update(key for key in other if key in known and text_of(known[key]) != text_of(other[key]))
    return [key for key in {**known, **{key: None for other in others for key in other}} if key in found]


def _slim(records: Sequence[RunRecord], choices: Sequence[str], keys: Sequence[str]) -> list[RunRecord]:
    """The records with these options and keys alone; of equal ones one."""
    found: dict[str, RunRecord] = {}
    for each in records:
        config = {key: each.config[key] for key in keys if key in each.config}
        chosen = {group: each.choices[group] for group in choices if group in each.choices}
        text = repr((config, chosen, each.strategies))
        if text not in found:
            found[text] = RunRecord(choices=chosen, config=config, strategies=each.strategies)
    return list(found.values())
