"""What a calibration found: times by point, and the figures of a `cost=measured` that are taken from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any

import numpy as np

from mcjax.cost.measured import Copies, Line, Spread
from mcjax.cost.measurements import Measurement
from mcjax.types import NS_PER_S

QUANTILES = 513
"""Of the spread: fine enough for a ninety-ninth percentile."""

LEAST = QUANTILES // 100
"""Which of them counts as the least that a step may take: the first percentile."""


Passes = dict[tuple[int, int], list[list[float]]]
"""By point, (start, length) or (batch, context): nanoseconds of equal steps, a list a pass."""


def _passes() -> Passes:
    return defaultdict(list)


def _times() -> dict[int, list[float]]:
    return defaultdict(list)


@dataclass(slots=True)
class Found:
    """What was measured: steps alone and beside the other role, and copies by blocks."""

    prefill_alone: Passes = field(default_factory=_passes)
    prefill_beside: Passes = field(default_factory=_passes)
    decode_alone: Passes = field(default_factory=_passes)
    decode_beside: Passes = field(default_factory=_passes)
    off_device: dict[int, list[float]] = field(default_factory=_times)
    onto_device: dict[int, list[float]] = field(default_factory=_times)
    between_hosts: dict[int, list[float]] = field(default_factory=_times)

    def measurements(self) -> tuple[Measurement, ...]:
        """The medians of the steps that had the machine to themselves; a decode point's context is of the batch."""
        chunks = [
            Measurement("prefill", start, length, 0, 0, middle(passes) / NS_PER_S)
            for (start, length), passes in sorted(self.prefill_alone.items())
        ]
        steps = [
            Measurement("decode", 0, 0, batch, batch * context, middle(passes) / NS_PER_S)
            for (batch, context), passes in sorted(self.decode_alone.items())
        ]
        return (*chunks, *steps)

    def slowdown(self) -> dict[str, dict[str, float]]:
        """How much longer each kind takes beside the other: the median over the points; never less than 1."""
        found: dict[str, dict[str, float]] = {}
        for kind, other, alone, beside in (
            ("prefill", "decode", self.prefill_alone, self.prefill_beside),
            ("decode", "prefill", self.decode_alone, self.decode_beside),
        ):
            factors = [middle(passes) / middle(alone[point]) for point, passes in beside.items() if point in alone]
            if factors:
                found[kind] = {other: max(1.0, round(median(factors), 4))}
        return found

    def spread(self) -> dict[str, Spread]:
        """How unsteady steps were, by kind, those beside others too: a pass is short."""
        found: dict[str, Spread] = {}
        for kind, groups in (
            ("prefill", (self.prefill_alone, self.prefill_beside)),
            ("decode", (self.decode_alone, self.decode_beside)),
        ):
            points = [passes for group in groups for passes in group.values()]
            found[kind] = spread_of([[ns / middle(passes) for ns in times] for passes in points for times in passes])
        return found

    def merged(self, other: Found) -> Found:
        """All measurements of both."""
        both = Found()
        for item in fields(Found):
            mine: dict[Any, list[Any]] = getattr(both, item.name)
            for part in (self, other):
                for point, times in getattr(part, item.name).items():
                    mine[point].extend(times)
        return both

    def as_json(self) -> dict[str, list[Any]]:
        """Plain values, which `of_json` reads."""
        return {
            item.name: [[point, times] for point, times in getattr(self, item.name).items()] for item in fields(Found)
        }

    @classmethod
    def of_json(cls, content: dict[str, list[Any]]) -> Found:
        found = cls()
        for item in fields(Found):
            mine: dict[Any, list[Any]] = getattr(found, item.name)
            for entry in content[item.name]:
                point: Any = entry[0]
                mine[point if isinstance(point, int) else (int(point[0]), int(point[1]))].extend(entry[1])
        return found

    def copies(self) -> Copies:
        return Copies(line(self.off_device), line(self.onto_device), line(self.between_hosts))


def middle(passes: Sequence[Sequence[float]]) -> float:
    """The median of the passes' medians."""
    return median(median(times) for times in passes)


def spread_of(groups: Sequence[Sequence[float]]) -> Spread:
    """From what steps took over what they were expected to take, those together that followed each other closely.

    A long group counts as many times as it has steps, and the median of both factors together is 1.
    """
    lasting = quantiles([median(ratios) for ratios in groups for _ in ratios])
    fleeting = quantiles([ratio / median(ratios) for ratios in groups for ratio in ratios])
    both = float(np.median(np.outer(lasting, fleeting)))
    least = quantiles([ratio for ratios in groups for ratio in ratios])[LEAST]
    return Spread(tuple(round(factor / both, 4) for factor in lasting), fleeting, least)


def quantiles(ratios: Sequence[float]) -> tuple[float, ...]:
    """Their distribution, least to most, in equal steps of probability."""
    points = np.quantile(np.array(ratios), np.linspace(0, 1, QUANTILES))
    return tuple(round(float(point), 4) for point in points)


def line(times: dict[int, list[float]]) -> Line:
    """Least squares through the medians; neither part is below 0."""
    counts = np.array(sorted(times), np.float64)
    ns = np.array([median(times[int(count)]) for count in counts], np.float64)
    if len(counts) == 1:
        return Line(0, round(float(ns[0] / counts[0])))
    spread = counts - counts.mean()
    each = max(0.0, float((spread * (ns - ns.mean())).sum() / (spread * spread).sum()))
    return Line(max(0, round(float(ns.mean() - each * counts.mean()))), round(each))
