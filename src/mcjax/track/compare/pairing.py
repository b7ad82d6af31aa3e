"""How the runs of two groups stand against one another: in pairs, by blocks of time, or each for itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mcjax.track.compare.blocks import same_traffic
from mcjax.track.groups import Group, Pair
from mcjax.track.metrics import figures
from mcjax.track.run import Run

Way = Literal["pairs", "blocks", "unpaired", "none"]
OF_THE_MACHINE = ("seed", "wall_s", "peak_rss_bytes")
"""Figures in which runs with equal rows may differ."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The repetitions of a group that may count as independent: runs by the pair that stands for them.

    Several runs behind one pair are averaged.
    """

    runs: Mapping[Pair, tuple[Run, ...]]
    notes: tuple[str, ...] = ()
    seeds_change_nothing: bool = False
    seeds_share_traffic: bool = False


@dataclass(frozen=True, slots=True)
class Match:
    """Two groups' samples, matched. `pairs` are those that both have; `missing` says what only one of them has."""

    way: Way
    pairs: tuple[Pair, ...] = ()
    first: Mapping[Pair, tuple[Run, ...]] = field(default_factory=dict[Pair, "tuple[Run, ...]"], repr=False)
    second: Mapping[Pair, tuple[Run, ...]] = field(default_factory=dict[Pair, "tuple[Run, ...]"], repr=False)
    missing: str = ""
    why: str = ""
    """Why there is no interval."""


def samples_of(group: Group) -> Samples:
    """What of a group's seeds and slices is a repetition, and what is the same thing again."""
    seeds_of: dict[int, list[int]] = {}
    for seed, slice_ in group.runs:
        seeds_of.setdefault(slice_, []).append(seed)
    whole = {pair: (run,) for pair, run in group.runs.items()}
    if all(len(seeds) == 1 for seeds in seeds_of.values()):
        return Samples(whole)
    if all(_equal([group.runs[seed, slice_] for seed in seeds]) for slice_, seeds in seeds_of.items()):
        one = {(seeds[0], slice_): (group.runs[seeds[0], slice_],) for slice_, seeds in seeds_of.items()}
        return Samples(one, seeds_change_nothing=True, seeds_share_traffic=True)
    slice_, seeds = next((slice_, seeds) for slice_, seeds in seeds_of.items() if len(seeds) > 1)
    shared = same_traffic(group.runs[seeds[0], slice_], group.runs[seeds[1], slice_])
    return Samples(whole, seeds_share_traffic=shared)


def match(first: Group, second: Group, of_first: Samples, of_second: Samples) -> Match:
    """Match two groups on seed and slice, as far as these make a difference."""
    if of_first.seeds_change_nothing and of_second.seeds_change_nothing:
        by_slice = [{pair[1]: runs for pair, runs in samples.runs.items()} for samples in (of_first, of_second)]
        return _matched(*({(0, slice_): runs for slice_, runs in one.items()} for one in by_slice))
    runs = [{pair: (run,) for pair, run in group.runs.items()} for group in (first, second)]
    slices = {slice_ for one in runs for _, slice_ in one}
    if of_first.seeds_share_traffic and of_second.seeds_share_traffic and len(slices) > 1:
        # Seeds inside a slice see the same requests: they are one repetition of it, not several.
        common = [pair for pair in runs[0] if pair in runs[1]]
        return _matched(*(_by_slice({pair: one[pair] for pair in common}) for one in runs))
    return _matched(*runs)


def _matched(first: Mapping[Pair, tuple[Run, ...]], second: Mapping[Pair, tuple[Run, ...]]) -> Match:
    common = tuple(sorted(pair for pair in first if pair in second))
    sizes = len(first), len(second)
    missing = "" if sizes == (len(common),) * 2 else f"{len(common)} in common of {sizes[0]} and {sizes[1]}"
    if len(common) > 1:
        return Match("pairs", common, first, second, missing)
    if len(common) == 1 or sizes == (1, 1):
        return Match("blocks", common, first, second, missing if common else "")
    if min(sizes) > 1:
        return Match("unpaired", (), first, second, missing)
    return Match("none", (), first, second, missing, "no seed and slice in common, and one run alone on a side")


def _by_slice(runs: Mapping[Pair, tuple[Run, ...]]) -> dict[Pair, tuple[Run, ...]]:
    found: dict[Pair, tuple[Run, ...]] = {}
    for (_, slice_), members in runs.items():
        found[0, slice_] = (*found.get((0, slice_), ()), *members)
    return found


def _equal(runs: list[Run]) -> bool:
    digests = {str(run.summary.get("digest") or "") for run in runs}
    if "" not in digests:
        return len(digests) == 1
    first, *others = (
        {name: value for name, value in figures(run.summary).items() if name not in OF_THE_MACHINE} for run in runs
    )
    return all(other == first for other in others)
