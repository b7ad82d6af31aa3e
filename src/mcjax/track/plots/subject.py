"""What a picture is of: groups of runs with their names and looks, and the stretch of run time that is shown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mcjax.errors import ConfigError, RunError
from mcjax.track.groups import Group, groups_of, label_of
from mcjax.track.plots.style import LOOKS, WIDTHS, Look
from mcjax.track.run import Run
from mcjax.track.runs import Runs
from mcjax.types import NS_PER_S

LONGEST_LABEL = 44
MISSING = "(none)"


@dataclass(frozen=True, slots=True)
class Subject:
    """`labels[i]` names `groups[i]` within `heading`, the keys that differ.

    `cut` says how many groups there was no room for, `missing` which runs there were none of.
    """

    groups: Sequence[Group]
    labels: Sequence[str]
    heading: str = ""
    cut: str = ""
    missing: Sequence[str] = ()
    width: str = "column"
    from_s: float = 0.0
    to_s: float = math.inf
    options: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def width_in(self) -> float:
        return WIDTHS[self.width]

    def look(self, index: int) -> Look:
        return LOOKS[index % len(LOOKS)]

    def first(self, most: int) -> Subject:
        """No more groups than `most`, and that it is so."""
        if len(self.groups) <= most:
            return self
        cut = f"the first {most} of {len(self.groups)} groups"
        return replace(self, groups=self.groups[:most], labels=self.labels[:most], cut=cut)

    def span_ns(self) -> tuple[int, int]:
        """From and to when, in run time: as asked, and no further than the longest run. Raises `ConfigError`, and
        `RunError` for runs that took no time (`backend=hits`)."""
        longest_s = max(run.summary["duration_s"] for group in self.groups for run in group.runs.values())
        if not longest_s:
            raise RunError("no run time passed in it: there is nothing to draw over time")
        to_s = min(self.to_s, longest_s)
        if self.from_s >= to_s:
            raise ConfigError("from_s", self.from_s, f"must be before {to_s:g}, where the picture ends")
        return round(self.from_s * NS_PER_S), round(to_s * NS_PER_S)


def subject_of(runs: Sequence[Run]) -> Subject:
    """The runs that are done, by group. Raises `RunError` if there is none."""
    done = [run for run in runs if run.state == "done"]
    if not done:
        ended = f"; it ended early: {runs[0].reason.splitlines()[0]}" if len(runs) == 1 and runs[0].reason else ""
        raise RunError(f"there is no finished run to draw{ended}")
    counts = {"run that ended early": len(runs) - len(done)}
    if isinstance(runs, Runs):
        counts["run that could not be read"] = len(runs.refused)
        counts["point of the sweep that did not finish"] = len(runs.sweep.missing()) if runs.sweep else 0
    missing = [f"{count} {_several(what, count)}" for what, count in counts.items() if count]
    groups = groups_of(done)
    keys = list(dict.fromkeys(key for group in groups for key in group.values))
    return Subject(groups, _apart(labels_of(groups, keys)), ", ".join(short_names(keys)), missing=missing)


def _several(what: str, count: int) -> str:
    noun, _, rest = what.partition(" ")
    return what if count == 1 else f"{noun}s {rest}"


def labels_of(groups: Sequence[Group], keys: Sequence[str]) -> list[str]:
    """The values of `keys`, of each group; of the whole if there are none."""
    if not keys:
        return [group.label for group in groups]
    return [", ".join(_shown(key, group.values.get(key)) for key in keys) for group in groups]


def short_names(keys: Sequence[str]) -> list[str]:
    """`sched/prefill` as `prefill`, where the short names stay apart."""
    short = [_short(key) for key in keys]
    return [name if short.count(name) == 1 else key for key, name in zip(keys, short, strict=True)]


def _short(key: str) -> str:
    return key.removesuffix("._target_").rpartition("/")[2].rpartition(".")[2]


def _shown(key: str, value: str | None) -> str:
    return MISSING if value is None else label_of({key: value}).partition("=")[2]


def _apart(labels: Sequence[str]) -> list[str]:
    """Short enough to be read beside a picture, without two becoming one."""
    cut = [f"{label[: LONGEST_LABEL - 1]}…" if len(label) > LONGEST_LABEL else label for label in labels]
    return [f"{label} ({index + 1})" if cut.count(label) > 1 else label for index, label in enumerate(cut)]


def without_rows(run: Run, kind: str, what: str, level: str) -> None:
    """A run has no rows of what a kind is drawn from: nothing happened, or nothing of it was kept.

    Raises `RunError` for the second; `level` is the least that keeps it.
    """
    run.require(level, f"kind={kind} is drawn from {what}")
