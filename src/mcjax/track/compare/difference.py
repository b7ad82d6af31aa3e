"""How far one group lies from another in one figure, and between which bounds that may be believed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mcjax.track.compare import bootstrap
from mcjax.track.compare.blocks import Blocks, blocks_of, same_traffic
from mcjax.track.compare.bootstrap import Interval
from mcjax.track.compare.pairing import Match, Samples, Way, match, samples_of
from mcjax.track.compare.weighted import WeightedRun, is_rate
from mcjax.track.groups import Group, Pair
from mcjax.track.metrics import Metric
from mcjax.track.run import Run

ONE_PAIR = "only one pair has this figure"
NOT_OF_REQUESTS = "cannot be computed again from requests"


@dataclass(frozen=True, slots=True)
class Difference:
    """A group's figure less that of another. `interval` is None where there is none; `why` says why."""

    value: float
    interval: Interval | None
    count: int
    """Pairs, or blocks, that it rests on."""
    way: Way
    enough: bool
    """Whether so many can speak at the level that was asked for."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The blocks of runs that met the same traffic; equal `number`, equal traffic."""

    number: int
    blocks: Blocks | str


class Differences:
    """Differences between groups, by number. Runs' requests are read only where one run stands for a group, or `by`
    names a column of them. Equal arguments give equal intervals."""

    def __init__(self, groups: Sequence[Group], by: str, resamples: int, seed: int):
        self.samples = [samples_of(group) for group in groups]
        self._groups, self._by, self._resamples, self._seed = groups, by, resamples, seed
        self._matches: dict[tuple[int, int], Match] = {}
        self._chosen: dict[tuple[int, int], NDArray[np.int64]] = {}
        self._stretches: dict[int, _Stretch] = {}
        self._runs: dict[tuple[int, str, bool], WeightedRun] = {}
        self._draws: dict[tuple[int, str, str], NDArray[np.float64] | str] = {}

    def value(self, run: Run, metric: Metric, part: str) -> float | None:
        """A run's figure, of all its requests or of those of one part."""
        return self._weighted(run, part, None).once(metric.name) if self._by else metric.of(run.summary)

    def match(self, first: int, second: int) -> Match:
        if (first, second) not in self._matches:
            groups, samples = self._groups, self.samples
            found = match(groups[first], groups[second], samples[first], samples[second])
            self._matches[first, second] = found
        return self._matches[first, second]

    def between(self, first: int, second: int, metric: Metric, part: str, error: float) -> Difference | None:
        """`second` less `first`; None where one of them has no such figure. The interval misses with `error`."""
        found = self.match(first, second)
        if found.way == "pairs":
            return self._of_pairs(found, metric, part, error)
        sides = [self._values(runs.values(), metric, part) for runs in (found.first, found.second)]
        if found.way == "blocks":
            runs = [self._one(runs, found) for runs in (found.first, found.second)]
            sides = [self._values([(run,)], metric, part) for run in runs]
            return self._of_blocks(runs[0], runs[1], metric, part, error) if all(map(len, sides)) else None
        if not all(map(len, sides)):
            return None
        value = float(sides[1].mean() - sides[0].mean())
        sizes = len(sides[0]), len(sides[1])
        if found.way == "none" or min(sizes) < 2:
            return Difference(value, None, 0, "none", False, found.why or "one run alone on a side")
        chosen = self._indices(sizes[0], 0), self._indices(sizes[1], 1)
        interval = bootstrap.unpaired(sides[0], sides[1], error, chosen)
        return Difference(value, interval, min(sizes), "unpaired", bootstrap.enough_unpaired(*sizes, error))

    def _of_pairs(self, found: Match, metric: Metric, part: str, error: float) -> Difference | None:
        sides = [
            [self._values([runs[pair]], metric, part) for pair in found.pairs] for runs in (found.first, found.second)
        ]
        both = [float(b[0] - a[0]) for a, b in zip(*sides, strict=True) if len(a) and len(b)]
        if not both:
            return None
        differences = np.array(both)
        value = float(differences.mean())
        if len(both) == 1:
            return Difference(value, None, 1, "pairs", False, ONE_PAIR)
        interval = bootstrap.paired(differences, error, self._indices(len(both), 0))
        return Difference(value, interval, len(both), "pairs", len(both) >= bootstrap.pairs_needed(error))

    def _of_blocks(self, first: Run, second: Run, metric: Metric, part: str, error: float) -> Difference:
        ends = [self.value(run, metric, part) for run in (first, second)]
        value = (ends[1] or 0.0) - (ends[0] or 0.0)
        draws = [self._drawn(run, metric, part) for run in (first, second)]
        for drawn in draws:
            if isinstance(drawn, str):
                return Difference(value, None, 0, "blocks", False, drawn)
        blocks = self._stretch(first).blocks
        count = blocks.count if isinstance(blocks, Blocks) else 0
        interval = bootstrap.percentiles(np.asarray(draws[1]) - np.asarray(draws[0]), error, count)
        if is_rate(metric.name):
            # How long a run takes to end is seen once, and no resampling varies it: the interval also covers what the
            # difference would be over windows of one length.
            lengths = [float(run.summary.get("window_s") or 0.0) or 1.0 for run in (first, second)]
            alike = np.asarray(draws[1]) * (lengths[1] / lengths[0]) - np.asarray(draws[0])
            interval = interval.joined(bootstrap.percentiles(alike, error, count))
        return Difference(value, interval, count, "blocks", True)

    def blocks(self, first: int, second: int) -> tuple[Blocks | str, bool]:
        """The blocks of two groups of one run each, and whether the two met the same traffic."""
        found = self.match(first, second)
        ours, theirs = (self._stretch(self._one(runs, found)) for runs in (found.first, found.second))
        return ours.blocks if isinstance(ours.blocks, str) else theirs.blocks, ours.number == theirs.number

    def _one(self, runs: Mapping[Pair, tuple[Run, ...]], found: Match) -> Run:
        return runs[found.pairs[0]][0] if found.pairs else next(iter(runs.values()))[0]

    def _drawn(self, run: Run, metric: Metric, part: str) -> NDArray[np.float64] | str:
        key = (id(run), metric.name, part)
        if key not in self._draws:
            self._draws[key] = self._draw(run, metric, part)
        return self._draws[key]

    def _draw(self, run: Run, metric: Metric, part: str) -> NDArray[np.float64] | str:
        stretch = self._stretch(run)
        if isinstance(stretch.blocks, str):
            return stretch.blocks
        weighted = self._weighted(run, part, stretch.blocks)
        again, logged = weighted.once(metric.name), self.value(run, metric, part)
        if again is None or logged is None or not math.isclose(again, logged, rel_tol=1e-9):
            return NOT_OF_REQUESTS
        key = (stretch.blocks.count, -1 - stretch.number)
        if key not in self._chosen:
            rng = np.random.default_rng([self._seed, 1, stretch.number])
            self._chosen[key] = bootstrap.block_counts(self._resamples, stretch.blocks.count, rng)
        drawn = weighted.figures(metric.name, self._chosen[key])
        return NOT_OF_REQUESTS if drawn is None else drawn

    def _stretch(self, run: Run) -> _Stretch:
        if id(run) not in self._stretches:
            self._divide([run, *(samples_run for samples in self.samples for samples_run in _alone(samples))])
        return self._stretches[id(run)]

    def _divide(self, runs: Sequence[Run]) -> None:
        """One division of time for all of `runs` that met the same traffic."""
        alike: list[list[Run]] = []
        for run in runs:
            if id(run) in self._stretches or any(run is other for members in alike for other in members):
                continue
            same = next((members for members in alike if same_traffic(members[0], run)), None)
            alike.append([run]) if same is None else same.append(run)
        for members in alike:
            stretch = _Stretch(len(self._stretches), blocks_of(members))
            self._stretches.update({id(run): stretch for run in members})

    def _weighted(self, run: Run, part: str, blocks: Blocks | None) -> WeightedRun:
        key = (id(run), part, blocks is not None)
        if key not in self._runs:
            self._runs[key] = WeightedRun(run, blocks, self._by, part)
        return self._runs[key]

    def _values(self, many: Iterable[tuple[Run, ...]], metric: Metric, part: str) -> NDArray[np.float64]:
        """A value for each of many tuples of runs, those without one left out."""
        found: list[float] = []
        for runs in many:
            values = [self.value(run, metric, part) for run in runs]
            known = [value for value in values if value is not None]
            if known:
                found.append(math.fsum(known) / len(known))
        return np.array(found)

    def _indices(self, size: int, stream: int) -> NDArray[np.int64]:
        if (size, stream) not in self._chosen:
            rng = np.random.default_rng([self._seed, 0, size, stream])
            self._chosen[size, stream] = bootstrap.resamples(self._resamples, size, rng)
        return self._chosen[size, stream]


def _alone(samples: Samples) -> tuple[Run, ...]:
    """The run of a group that has but one."""
    return next(iter(samples.runs.values())) if len(samples.runs) == 1 else ()
