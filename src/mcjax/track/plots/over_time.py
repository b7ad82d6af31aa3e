"""Quantities over run time: brought to one grid of bins, averaged over repetitions, drawn a panel a quantity."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.track.plots.bands import band
from mcjax.track.plots.drawn import Drawn
from mcjax.track.plots.panels import (
    MOST_LINES,
    Line,
    Values,
    draw_lines,
    joined,
    legend,
    line_rows,
    nothing,
    size_axis,
    stacked,
    time_axis,
)
from mcjax.track.plots.subject import Subject
from mcjax.track.run import Run
from mcjax.types import NS_PER_S

BINS_AN_INCH = 36
PANEL_IN = 1.15

Edges = NDArray[np.int64]
PerSource = NDArray[np.float64]
"""`[sources, bins]`, NaN where there is nothing: one row for a quantity of the whole cluster."""
Quantities = Mapping[str, PerSource]
"""By the title of their panel."""
Read = Callable[[Run, Edges], Quantities]


def edges_of(subject: Subject, least_ns: int = 1) -> Edges:
    """`[bins + 1]` times: as many bins as the width shows, none shorter than `least_ns`."""
    from_ns, to_ns = subject.span_ns()
    bins = max(1, min(round(subject.width_in * BINS_AN_INCH), (to_ns - from_ns) // max(least_ns, 1)))
    return np.linspace(from_ns, to_ns, bins + 1).astype(np.int64)


def over_time(subject: Subject, read: Read, least_ns: int = 1, form: Callable[[str, Any], None] | None = None) -> Drawn:
    """A panel a quantity, a line a group. `form(title, panel)` shapes an axis; else its numbers are written as 20 k.

    A line is the mean over sources and repetitions. Its band is the 95 % interval over repetitions; of a single run,
    where there are several sources, it goes from the least of them to the most. Where fewer than half of the
    repetitions still ran, there is no line.
    """
    shown = subject.first(MOST_LINES)
    edges = edges_of(shown, least_ns)
    found = [[read(run, edges) for run in group.runs.values()] for group in shown.groups]
    titles = list(dict.fromkeys(title for of_group in found for of_run in of_group for title in of_run))
    end_ns = _end_ns(edges, found)
    figure, panels = stacked(shown, max(len(titles), 1), PANEL_IN)
    scale = time_axis(panels, int(edges[0]), end_ns)
    tables: list[Any] = []
    for title, panel in zip(titles, panels, strict=False):
        lines: list[Line] = []
        for index, of_group in enumerate(found):
            parts = [of_run[title] for of_run in of_group if title in of_run]
            if parts:
                lines.append(_line(index, edges, parts))
        draw_lines(shown, panel, [_scaled(line, scale) for line in lines])
        panel.set_title(title)
        panel.set_ylim(bottom=0)
        (form or _sizes)(title, panel)
        tables.append(line_rows(shown, [_scaled(line, NS_PER_S) for line in lines], "time_s", "value", panel=title))
    if not titles:
        nothing(panels[0], "nothing happened")
        tables.append(line_rows(shown, [], "time_s", "value", panel=""))
    legend(shown, figure)
    return Drawn(figure, joined(tables))


def _end_ns(edges: Edges, found: Sequence[Sequence[Quantities]]) -> int:
    """Where the last bin ends in which anything was seen."""
    seen = [np.isfinite(values).any(axis=0) for group in found for run in group for values in run.values()]
    bins = np.flatnonzero(np.any(seen, axis=0)).tolist() if seen else []
    return int(edges[bins[-1] + 1]) if bins else int(edges[-1])


def _sizes(title: str, panel: Any) -> None:
    size_axis(panel.yaxis)


def _line(group: int, edges: Edges, parts: Sequence[PerSource]) -> Line:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a bin in which no source says anything stays NaN
        means = np.stack([np.nanmean(part, axis=0) for part in parts])
        least, most = np.nanmin(parts[0], axis=0), np.nanmax(parts[0], axis=0)
    mean, low, high = band(means)
    kind = "95 % over repetitions" if len(parts) > 1 else ""
    if len(parts) == 1 and len(parts[0]) > 1:
        low, high, kind = least, most, f"least to most of {len(parts[0])}"
    mean = np.where(2 * np.isfinite(means).sum(axis=0) >= len(means), mean, np.nan)
    middles = (edges[:-1] + edges[1:]) / 2
    there = np.isfinite(mean)  # a gap is a bin in which nothing was seen: the line goes on over it
    return Line(group, middles[there], mean[there], low[there], high[there], kind)


def _scaled(line: Line, scale: float) -> Line:
    return Line(line.group, line.x / scale, line.y, line.low, line.high, line.band)


def rate(times_ns: NDArray[np.int64], amounts: NDArray[Any], edges: Edges) -> Values:
    """`[bins]`: how much came a second, in each bin."""
    sums, _ = np.histogram(times_ns, edges, weights=amounts)
    return sums / (np.diff(edges) / NS_PER_S)


def present(begin_ns: NDArray[np.int64], end_ns: NDArray[np.int64], weights: NDArray[Any], edges: Edges) -> Values:
    """`[bins]`: the mean, over each bin's time, of the summed weights of the intervals that hold at a moment."""
    grown = _since(begin_ns, weights, edges) - _since(end_ns, weights, edges)
    return np.diff(grown) / np.diff(edges)


def _since(times_ns: NDArray[np.int64], weights: NDArray[Any], edges: Edges) -> Values:
    """`[bins + 1]`: the sum, over times before each edge, of weight times how long ago."""
    order = np.argsort(times_ns, kind="stable")
    ordered, of = times_ns[order].astype(np.float64), weights[order].astype(np.float64)
    zero = np.zeros(1)
    count = np.searchsorted(ordered, edges, side="right")
    weight, moment = np.concatenate([zero, np.cumsum(of)]), np.concatenate([zero, np.cumsum(of * ordered)])
    return edges * weight[count] - moment[count]


def running(run: Run, edges: Edges) -> NDArray[np.bool_]:
    """`[bins]`: whether the run went on at the beginning of the bin."""
    return edges[:-1] < run.summary["duration_s"] * NS_PER_S
