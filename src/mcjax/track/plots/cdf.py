"""The distribution of a latency, a curve a group: the share that took at most so long."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mcjax.track.levels import REQUESTS
from mcjax.track.metrics import metric
from mcjax.track.plots.bands import band
from mcjax.track.plots.curves import counted, latencies, shares, told_apart, values_of
from mcjax.track.plots.drawn import Drawn
from mcjax.track.plots.panels import (
    MOST_LINES,
    Line,
    draw_lines,
    legend,
    line_rows,
    log_axis,
    nothing,
    share_axis,
    stacked,
    time_unit,
)
from mcjax.track.plots.subject import Subject, without_rows
from mcjax.types import NS_PER_S

HEIGHT_IN = 1.8
WIDE = 10
"""The largest value is so many medians away where an axis of logarithms shows more."""


def cdf(subject: Subject, kind: str, column: str, name: str, unit: str) -> Drawn:
    """`unit` is what is counted: requests, or intervals."""
    shown = subject.first(MOST_LINES)
    lines = [_line(shown, index, kind, column) for index in range(len(shown.groups))]
    drawn_lines = [line for line in lines if len(line.x)]
    lost = [_lost(shown, index) for index in range(len(lines))]
    figure, (panel,) = stacked(shown, 1, HEIGHT_IN, lost)
    panel.set_ylabel(f"share of {unit}")
    panel.set_ylim(0, 1.02)
    share_axis(panel.yaxis)
    if drawn_lines:
        scale, sign, _ = time_unit(max(line.x[-1] for line in drawn_lines))
        draw_lines(shown, panel, [replace(line, x=line.x / scale) for line in drawn_lines], step=True)
        medians = [line.x[np.searchsorted(line.y, 0.5)] for line in drawn_lines]
        smallest = min(line.x[0] for line in drawn_lines)
        if smallest > 0 and max(line.x[-1] for line in drawn_lines) > WIDE * min(medians):
            panel.set_xscale("log")
            log_axis(panel.xaxis)
        else:
            panel.set_xlim(left=0)
        panel.set_xlabel(f"{name}, {sign}")
    else:
        nothing(panel, f"no {unit}")
    legend(shown, figure, lost)
    rows = [replace(line, x=line.x / NS_PER_S) for line in drawn_lines]
    return Drawn(figure, line_rows(shown, rows, column.replace("intervals_ns", "tbt_s").replace("_ns", "_s"), "share"))


def _line(subject: Subject, index: int, kind: str, column: str) -> Line:
    """The mean over repetitions of the share at each of a few hundred values, and how sure it is."""
    counts = [counted(latencies(run, column)) for run in subject.groups[index].runs.values()]
    for run, found in zip(subject.groups[index].runs.values(), counts, strict=True):
        if not found.any():
            without_rows(run, kind, "latencies of requests", REQUESTS)
    counts = [found for found in counts if found.any()]
    if not counts:
        none = np.zeros(0)
        return Line(index, none, none, none, none)
    # Every repetition weighs the same, however many requests it had.
    bins = told_apart(np.sum([found / found.sum() for found in counts], axis=0))
    mean, low, high = band(np.stack([shares(found, bins) for found in counts]))
    return Line(index, values_of(bins), mean, low, high, "95 % over repetitions" if len(counts) > 1 else "")


def _lost(subject: Subject, index: int) -> str:
    """` (3 % lost)`: those who got no answer are in no latency, and are named beside it."""
    runs = subject.groups[index].runs.values()
    submitted, completed = (
        sum(metric(f"requests.{name}").of(run.summary) or 0 for run in runs) for name in ("submitted", "completed")
    )
    lost = 1 - completed / submitted if submitted else 0.0
    return f" ({lost:.1%} lost)" if lost else ""
