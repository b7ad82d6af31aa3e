"""Runs that are repetitions of one another, and what tells one group of them from the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mcjax.track.flat import text_of
from mcjax.track.record import RunRecord

if TYPE_CHECKING:  # a list of runs reads no tables
    from mcjax.track.run import Run

PAIRED = ("seed", "slice")
"""Keys whose values make repetitions of one thing: with equal values two groups met the same traffic."""
IGNORED = ("track.", "hydra.", "rerun", "debug", "question", "verify", "plugins")
"""Keys that change nothing in what is compared."""

Pair = tuple[int, int]
"""A seed and a slice."""


@dataclass(frozen=True, slots=True)
class Group:
    """Runs of one config under several seeds and slices. `values` are those of the keys that differ between groups."""

    label: str
    values: Mapping[str, str]
    runs: Mapping[Pair, Run] = field(repr=False)
    repeated: int = 0
    """Runs that were left out, since a later one has their config, seed and slice too."""

    @property
    def first(self) -> Run:
        return next(iter(self.runs.values()))


def groups_of(runs: Sequence[Run]) -> list[Group]:
    """The groups in the order in which they first come; of several runs of one config and pair, the last is taken."""
    found: dict[tuple[tuple[str, str], ...], dict[Pair, Run]] = {}
    counts: Counter[tuple[tuple[str, str], ...]] = Counter()
    for run in runs:
        own = tuple(sorted(_own(run.record).items()))
        found.setdefault(own, {})[pair_of(run.record)] = run
        counts[own] += 1
    records = [next(iter(members.values())).record for members in found.values()]
    keys = differing_keys(records)
    groups: list[Group] = []
    for record, (own, members) in zip(records, found.items(), strict=True):
        values = {key: value for key, value in _own(record).items() if key in keys}
        label = label_of({key: values[key] for key in keys if key in values}) or "all runs"
        groups.append(Group(label, values, dict(sorted(members.items())), counts[own] - len(members)))
    return groups


def pair_of(record: RunRecord) -> Pair:
    return int(record.config.get("seed", 0) or 0), int(record.config.get("slice", 0) or 0)


def differing_keys(records: Sequence[RunRecord]) -> list[str]:
    """Choices and config keys whose values differ, seeds and slices apart.

    Where the choice of a group differs, its keys count only if they differ among the runs that have them.
    """
    owns = [_own(record) for record in records]
    names = list(dict.fromkeys(key for own in owns for key in own))
    chosen = [name for name in names if "/" in name or name in _groups(records)]
    differing = [name for name in chosen if len({own.get(name) for own in owns}) > 1]
    covered = tuple(name.replace("/", ".") + "." for name in differing)
    for name in names:
        if name in chosen:
            continue
        present = [own[name] for own in owns if name in own]
        choice_tells = name.startswith(covered) if covered else False
        if choice_tells and name.endswith("._target_") and not _custom(owns, name):
            continue
        if len(set(present)) > 1 or (len(present) < len(owns) and not choice_tells):
            differing.append(name)
    return differing


def label_of(values: Mapping[str, str]) -> str:
    """`prefill=random, rate_scale=2`: short keys, where they stay apart."""
    short = [key.rpartition("/")[2].rpartition(".")[2] for key in values]
    words: list[str] = []
    for key, name, value in zip(values, short, values.values(), strict=True):
        shown = value.rpartition(".")[2] if key.endswith("_target_") else value
        words.append(
            f"{key.removesuffix('._target_') if short.count(name) > 1 or name == '_target_' else name}={shown}"
        )
    return ", ".join(words)


def _own(record: RunRecord) -> dict[str, str]:
    """What makes a config what it is: choices, values, and the user's own code, as texts."""
    seed = record.config.get("seed")
    own = {
        name: choice for name, choice in record.choices.items() if not name.startswith(("hydra", "track", "experiment"))
    }
    for key, value in record.config.items():
        if key in PAIRED or key.startswith(IGNORED):
            continue
        if key.endswith(".seed") and value == seed:  # it follows the run's
            continue
        own[key] = text_of(value)
    for place, source in record.strategies.items():
        own[f"{place} (own code)"] = f"{source.name} {source.sha256[:8]}"
    return own


def _groups(records: Sequence[RunRecord]) -> set[str]:
    return {name for record in records for name in record.choices}


def _custom(owns: Sequence[Mapping[str, Any]], target: str) -> bool:
    """Whether a choice says only that the user's own code was taken."""
    group = target.removesuffix("._target_")
    return any(own.get(group.replace(".", "/"), own.get(group)) == "custom" for own in owns)
