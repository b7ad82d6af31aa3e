"""Figures of whole runs, by group: a bar each, or a line over a number that was swept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mcjax.errors import ConfigError
from mcjax.track.arrow import Table
from mcjax.track.plots.bands import scalar_band
from mcjax.track.plots.panels import (
    MOST_LINES,
    Line,
    draw_lines,
    grouping,
    joined,
    legend,
    log_axis,
    nothing,
    share_axis,
    stacked,
    table,
)
from mcjax.track.plots.style import BLUE, INK, SMALL_PT, Look, new_figure
from mcjax.track.plots.subject import Subject, labels_of, short_names
from mcjax.track.run import Run

MOST_BARS = 24
LEAST_POINTS = 3
"""Values of a number that make a line rather than bars."""
WIDE = 20
ROW_IN = 0.31

Figure = Callable[[Run], float | None]
"""A figure of one run, or None where it has none."""


@dataclass(frozen=True, slots=True)
class Swept:
    """`subject` has a group a line; `points[i]`: the value of `key`, and the group's index, at each point of it."""

    key: str
    subject: Subject
    points: Sequence[Sequence[tuple[float, int]]]


def swept(subject: Subject) -> Swept | None:
    """The groups as lines over a number, if there is one: the option `x`, or the number with the most values.

    Raises `ConfigError` if what `x` names is no number that differs.
    """
    keys = list(dict.fromkeys(key for group in subject.groups for key in group.values))
    numeric = {key: found for key in keys if (found := _numbers(subject, key)) is not None}
    asked = subject.options.get("x")
    if asked is not None:
        matching = [key for key in numeric if key == asked] or [k for k in numeric if k.rpartition(".")[2] == asked]
        if not matching:
            raise ConfigError("x", asked, "no number of this name differs between these runs", numeric)
        key = matching[0]
    else:
        # A point belongs to a line: as many values as lines, at least, or there would be lines of one point each.
        numeric = {name: found for name, found in numeric.items() if 2 * len(set(_lines(subject, name))) <= len(found)}
        key = max(numeric, key=lambda name: len(set(numeric[name])), default="")
        if not key or len(set(numeric[key])) < LEAST_POINTS:
            return None
    points: dict[str, list[tuple[float, int]]] = {}
    for index, label in enumerate(_lines(subject, key)):
        points.setdefault(label, []).append((numeric[key][index], index))
    named = {label: sorted(found) for label, found in points.items()}
    leaders = [subject.groups[found[0][1]] for found in named.values()]
    others = [other for other in keys if other != key]
    lines_of = replace(subject, groups=leaders, labels=list(named), heading=", ".join(short_names(others)))
    shown = lines_of.first(MOST_LINES)
    return Swept(key, shown, list(named.values())[: len(shown.groups)])


def _lines(subject: Subject, key: str) -> list[str]:
    """The line that each group is a point of: its values of the other keys."""
    others = list(dict.fromkeys(other for group in subject.groups for other in group.values if other != key))
    return labels_of(subject.groups, others) if others else [""] * len(subject.groups)


def _numbers(subject: Subject, key: str) -> list[float] | None:
    try:
        found = [float(group.values[key]) for group in subject.groups]
    except (KeyError, ValueError):
        return None
    return found if len(set(found)) > 1 and np.isfinite(found).all() else None


def sweep_panels(subject: Subject, found: Swept, panels: Mapping[str, tuple[Figure, str]]) -> tuple[Any, Table]:
    """A panel a figure, over the swept number. `panels`: by name, the figure and its unit ("share" for shares)."""
    figure, axes = stacked(found.subject, len(panels), 1.25)
    tables: list[Table] = []
    short = short_names([found.key])[0]
    for axis, (name, (figure_of, unit)) in zip(axes, panels.items(), strict=True):
        lines: list[Line] = []
        for index, points in enumerate(found.points):
            x = np.array([value for value, _ in points])
            bands = [scalar_band([figure_of(run) for run in subject.groups[g].runs.values()]) for _, g in points]
            y, low, high = np.array(bands, np.float64).T
            lines.append(Line(index, x, y, low, high))
            counts = np.array([len(subject.groups[group].runs) for _, group in points])
            label = found.subject.labels[index]
            columns = {found.key: x, "value": y, "low": low, "high": high, "repetitions": counts}
            tables.append(table(figure=name, group=label, **columns))
        draw_lines(found.subject, axis, lines, points=True)
        axis.set_title(f"{name}, {unit}" if unit != "share" else name)
        axis.set_ylim(bottom=0)
        if unit == "share":
            share_axis(axis.yaxis)
        every = np.concatenate([line.x for line in lines])
        if every.min() > 0 and every.max() >= WIDE * every.min():
            axis.set_xscale("log")
            log_axis(axis.xaxis)
        axis.set_xlabel(short if axis is axes[-1] or subject.width == "page" else "")
    legend(found.subject, figure)
    return figure, joined(tables)


def bar_rows(subject: Subject, extra_in: float = 0.0) -> tuple[Any, Any, Any]:
    """`(figure, left, right)`: two panels that share a row a group, its name above the row's bars."""
    figure = new_figure(subject.width_in, 0.75 + ROW_IN * len(subject.groups) + extra_in)
    left, right = figure.subplots(1, 2, sharey=True)
    for panel in (left, right):
        panel.set_ylim(len(subject.groups) - 0.35, -0.75)
        panel.set_yticks([])
        panel.grid(visible=False, axis="y")
        panel.spines["left"].set_visible(panel is left)
    for index, label in enumerate(subject.labels):
        left.text(0, index - 0.27, label, fontsize=SMALL_PT, va="bottom", ha="left", zorder=5, in_layout=False)
    left.set_xlabel(grouping(subject), fontsize=SMALL_PT, loc="left")
    return figure, left, right


def bars(panel: Any, bands: Sequence[tuple[float, float, float]], form: Callable[[float], str]) -> None:
    """A bar a group with its interval, and its value at its end."""
    values = np.nan_to_num(np.array([mean for mean, _, _ in bands]))
    panel.barh(range(len(values)), values, height=0.48, color=BLUE, zorder=2)
    ends = [np.nanmax([mean if np.isfinite(mean) else 0.0, high]) for mean, _, high in bands]
    for index, (mean, low, high) in enumerate(bands):
        if np.isfinite(low):
            panel.errorbar(
                mean, index, xerr=[[mean - low], [high - mean]], color=INK, capsize=2, linewidth=0.8, zorder=4
            )
        text = form(mean) if np.isfinite(mean) else "none"
        panel.annotate(text, (ends[index], index), (3, 0), textcoords="offset points", va="center", fontsize=SMALL_PT)
    panel.set_xlim(0, 1.35 * (max(ends, default=0.0) or 1.0))


def composition(figure: Any, panel: Any, parts: Mapping[str, Sequence[float]], looks: Mapping[str, Look]) -> None:
    """A bar a group, made of its parts; the parts are named below."""
    from matplotlib.patches import Patch

    left = np.zeros(len(next(iter(parts.values()))))
    for name, values in parts.items():
        look = looks[name]
        height = np.nan_to_num(np.array(values))
        panel.barh(
            range(len(height)), height, 0.48, left, color=look.colour, hatch=look.hatch, edgecolor="white", linewidth=0
        )
        left = left + height
    panel.set_xlim(0, 1)
    share_axis(panel.xaxis)
    shown = [name for name, values in parts.items() if np.nansum(values) > 0]
    if not shown:
        nothing(panel, "no requests")
        return
    handles = [
        Patch(facecolor=looks[name].colour, hatch=looks[name].hatch, edgecolor="white", linewidth=0) for name in shown
    ]
    columns = min(len(shown), 3 if figure.get_figwidth() < 5 else 5)
    figure.legend(handles=handles, labels=shown, loc="outside lower center", ncols=columns)
