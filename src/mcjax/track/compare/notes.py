"""What limits a comparison, in words: how intervals came about, what was left out, and what would help."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from mcjax.track.compare.bootstrap import ERROR, pairs_needed
from mcjax.track.compare.difference import NOT_OF_REQUESTS, ONE_PAIR, Differences
from mcjax.track.groups import Group

if TYPE_CHECKING:
    from mcjax.track.compare.comparison import Row

SLICES = "repeat over stretches of the trace instead: +slices=8"


def notes_of(groups: Sequence[Group], first: int, differences: Differences, rows: Sequence[Row]) -> list[str]:
    """Sentences, those that matter most first."""
    if len(groups) == 1:
        return ["one group only: there is nothing to compare it with", *_kept(groups)]
    others = [index for index in range(len(groups)) if index != first]
    return [
        *_matching(groups, first, others, differences),
        *_marks(len(groups), rows),
        *_seeds(groups, differences),
        *_no_interval(groups, rows),
        *_kept(groups),
    ]


def _matching(groups: Sequence[Group], first: int, others: Sequence[int], differences: Differences) -> Iterator[str]:
    """How each group was set against the baseline."""
    told: dict[str, list[int]] = {}
    for other in others:
        found = differences.match(first, other)
        missing = f" ({found.missing})" if found.missing else ""
        if found.way == "pairs":
            told.setdefault(
                f"studentised bootstrap over {len(found.pairs)} pairs of seed and slice{missing}", []
            ).append(other)
        elif found.way == "blocks":
            blocks, alike = differences.blocks(first, other)
            how = "drawn together" if alike else "drawn for each run by itself, since the two met different traffic"
            words = f"one run a group: {blocks}" if isinstance(blocks, str) else f"one run a group: {blocks}, {how}"
            short = not isinstance(blocks, str) and blocks.too_short
            words += ", which is shorter than requests live: the truth may lie further out" if short else ""
            told.setdefault(words + missing, []).append(other)
        elif found.way == "unpaired":
            told.setdefault(
                f"no seed and slice in common{missing}: unpaired bootstrap of the runs' figures", []
            ).append(other)
        else:
            told.setdefault(f"no interval: {found.why}{missing}", []).append(other)
    for words, which in told.items():
        whom = "" if len(told) == 1 else f" (of {', '.join(groups[index].label for index in which)})"
        yield f"differences are to {groups[first].label}; 95 % intervals{whom}: {words}"


def _marks(groups: int, rows: Sequence[Row]) -> Iterator[str]:
    """What the mark means, or why there is none."""
    others = groups - 1
    level = f"{100 * (1 - ERROR / others):.4g} %"
    if any(cell.best for row in rows for cell in row.cells):
        whom = "the other group" if others == 1 else f"each of the {others} others"
        yield f"* best: the {level} interval of its difference to {whom} excludes zero"
    counts = {
        cell.difference.count
        for row in rows
        for cell in row.cells
        if cell.difference and cell.difference.way == "pairs"
    }
    needed = pairs_needed(ERROR / others)
    few = sorted(count for count in counts if count < needed)
    if few:
        yield f"{few[0]} pairs are too few to mark anything as best: {needed} are needed for {groups} groups"


def _seeds(groups: Sequence[Group], differences: Differences) -> Iterator[str]:
    constant = [
        group for group, samples in zip(groups, differences.samples, strict=True) if samples.seeds_change_nothing
    ]
    if constant:
        whose = "all groups" if len(constant) == len(groups) else _labels(constant)
        yield (
            f"seeds change nothing in {whose}: a deterministic policy on one trace has no variance over seeds; "
            + SLICES
        )
    slices = {slice_ for group in groups for _, slice_ in group.runs}
    shared = [
        group
        for group, samples in zip(groups, differences.samples, strict=True)
        if samples.seeds_share_traffic and not samples.seeds_change_nothing
    ]
    if shared and len(slices) == 1:
        whose = _labels(shared)
        yield f"all seeds of {whose} met the same traffic: intervals are about chance inside the policy; {SLICES}"
    elif shared:
        yield "seeds of one slice met the same traffic: their mean counts as one"


def _no_interval(groups: Sequence[Group], rows: Sequence[Row]) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for row in rows:
        for cell in row.cells:
            if cell.difference and cell.difference.why in (NOT_OF_REQUESTS, ONE_PAIR):
                reasons.setdefault(cell.difference.why, []).append(row.metric.label)
    for why, labels in reasons.items():
        yield f"no interval of {', '.join(dict.fromkeys(labels))}: {why}"


def _kept(groups: Sequence[Group]) -> Iterator[str]:
    repeated = sum(group.repeated for group in groups)
    if repeated:
        yield f"{repeated} runs repeat the config, seed and slice of a later one, which was taken"
    runs = [run for group in groups for run in group.runs.values()]
    early = [str(run.directory or "in memory") for run in runs if run.state != "done"]
    if early:
        yield f"ended early, and taken all the same: {', '.join(early)}"
    if len({run.record.code for run in runs}) > 1:
        yield "the runs were made by different versions of the code (mcjax diff RUN RUN tells them apart)"


def _labels(groups: Iterable[Group]) -> str:
    return "; ".join(group.label for group in groups)
