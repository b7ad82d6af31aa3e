"""Panels of lines, one above the other, and the legend below them: what most kinds are made of."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.track.arrow import Table, arrow
from mcjax.track.plots.style import GREY, SMALL_PT, new_figure
from mcjax.track.plots.subject import Subject
from mcjax.types import NS_PER_S

Values = NDArray[np.float64]
LEGEND_LINE_IN = 0.15
CHARACTERS_AN_INCH = 17
HANDLE_PT = 34.0
"""What an entry of a legend is wide beside its name."""
MOST_LINES = 8
MARKS = 7
"""Markers a line: enough to follow it in grey, few enough to see it."""


@dataclass(frozen=True, slots=True)
class Line:
    """One group's line in one panel. `low` and `high` are the ends of its band, NaN where it has none."""

    group: int
    x: Values
    y: Values
    low: Values
    high: Values
    band: str = ""
    """What the band is."""


def stacked(subject: Subject, count: int, height_in: float, suffixes: Sequence[str] = ()) -> tuple[Any, list[Any]]:
    """A figure with `count` panels that share their x axis: one above the other in a column, two beside on a page."""
    columns = 2 if subject.width == "page" and count > 1 else 1
    rows = math.ceil(count / columns)
    below = LEGEND_LINE_IN * (_legend_rows(subject, suffixes) + 1) if len(subject.groups) > 1 else 0.0
    figure = new_figure(subject.width_in, rows * height_in + 0.25 + below)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
    panels = list(grid.flat)
    for extra in panels[count:]:
        extra.remove()
    return figure, panels[:count]


def draw_lines(subject: Subject, panel: Any, lines: Iterable[Line], step: bool = False, points: bool = False) -> None:
    """`points` marks every value (a few measured ones) instead of some along the line."""
    for line in lines:
        look = subject.look(line.group)
        where = {"drawstyle": "steps-post"} if step else {}
        count = int(np.isfinite(line.y).sum())
        # Each group's markers begin elsewhere, or those of equal lines would hide each other.
        every = 1 if points else (count * (line.group + 1) // ((MARKS + 1) * MOST_LINES), max(1, count // MARKS))
        several = len(subject.groups) > 1
        panel.plot(
            line.x,
            line.y,
            color=look.colour,
            linestyle=look.line if several else "-",
            marker=look.marker if several or points else "",
            markevery=every,
            zorder=3,
            **where,
        )
        if np.isfinite(line.low).any():
            filled = {"step": "post"} if step else {}
            panel.fill_between(
                line.x, line.low, line.high, color=look.colour, alpha=0.2, linewidth=0, zorder=2, **filled
            )


def line_rows(subject: Subject, lines: Iterable[Line], x: str, y: str, **constant: str) -> Table:
    """The lines as rows: group, x, y, the ends of its band, the repetitions of the group."""
    tables: list[Table] = [
        table(
            **constant,
            group=subject.labels[line.group],
            **{x: line.x, y: line.y},
            low=line.low,
            high=line.high,
            band=line.band,
            repetitions=len(subject.groups[line.group].runs),
        )
        for line in lines
    ]
    empty = np.zeros(0)
    return joined(tables) if tables else table(**constant, group="", **{x: empty, y: empty}, low=empty, high=empty)


def table(**columns: Any) -> Table:
    """A table from columns; a single value stands in every row. NaN becomes a missing cell."""
    pa = arrow()
    lengths = [len(values) for values in columns.values() if not isinstance(values, str | int | float)]
    rows = lengths[0] if lengths else 1
    made = {
        name: pa.array([values] * rows if isinstance(values, str | int | float) else values, from_pandas=True)
        for name, values in columns.items()
    }
    return pa.table(made)


def joined(tables: Sequence[Table]) -> Table:
    return arrow().concat_tables(list(tables), promote_options="permissive")


def legend(subject: Subject, figure: Any, suffixes: Sequence[str] = (), lines: bool = True) -> None:
    """The groups below the panels, under the keys that tell them apart; nothing for a single group."""
    if len(subject.groups) == 1:
        return
    from matplotlib.lines import Line2D

    handles: list[Any] = []
    for index in range(len(subject.groups)):
        look = subject.look(index)
        style = look.line if lines else ""
        handles.append(Line2D([], [], color=look.colour, linestyle=style, marker=look.marker))
    figure.legend(
        handles=handles,
        labels=named(subject, suffixes),
        title=heading(subject),
        loc="outside lower center",
        ncols=_legend_columns(subject, suffixes),
        alignment="left",
    )


def named(subject: Subject, suffixes: Sequence[str] = ()) -> list[str]:
    """The labels, with what is added to each."""
    added = suffixes or [""] * len(subject.labels)
    return [f"{label}{suffix}".lstrip("_") for label, suffix in zip(subject.labels, added, strict=True)]


def heading(subject: Subject) -> str:
    """The keys that differ, and what is not shown."""
    cut = f" ({subject.cut})" if subject.cut else ""
    wide = round(subject.width_in * CHARACTERS_AN_INCH)
    return textwrap.fill(f"{subject.heading}{cut}", wide)


def _legend_columns(subject: Subject, suffixes: Sequence[str] = ()) -> int:
    """As many as fit side by side."""
    from matplotlib.textpath import TextPath

    paths: list[Any] = [TextPath((0, 0), name, size=SMALL_PT) for name in named(subject, suffixes)]
    widest_pt = max(path.get_extents().width for path in paths)
    return max(1, min(len(subject.labels), int(72 * subject.width_in // (widest_pt + HANDLE_PT))))


def _legend_rows(subject: Subject, suffixes: Sequence[str]) -> int:
    return math.ceil(len(subject.groups) / _legend_columns(subject, suffixes))


def nothing(panel: Any, what: str) -> None:
    """Say that there is nothing, where it would be."""
    panel.text(0.5, 0.5, what, transform=panel.transAxes, ha="center", va="center", color=GREY)


def time_axis(panels: Sequence[Any], from_ns: int, to_ns: int) -> float:
    """Label the shared x axis as run time. Returns nanoseconds a unit of it."""
    scale, _, name = time_unit(to_ns)
    for panel in panels:
        panel.set_xlim(from_ns / scale, to_ns / scale)
    for panel in _lowest(panels):
        panel.set_xlabel(f"run time, {name}")
    return scale


def _lowest(panels: Sequence[Any]) -> list[Any]:
    """The panels that show the labels of the x axis: the last of each column."""
    specs = {panel: panel.get_subplotspec() for panel in panels}
    last = {spec.colspan.start: panel for panel, spec in specs.items()}
    for panel in last.values():
        panel.tick_params(labelbottom=True)
    return list(last.values())


def share_axis(axis: Any) -> None:
    """Shares of one, as percentages."""

    def form(value: float, _: object) -> str:
        return f"{100 * value:.4g}%"

    axis.set_major_formatter(form)


def size_axis(axis: Any) -> None:
    """Large numbers as 20 k and 3 M."""
    from matplotlib import ticker

    large: Any = ticker.EngFormatter(sep=" ")

    def form(value: float, at: object) -> str:
        return large(value, at) if abs(value) >= 1000 else plain(value, at)

    axis.set_major_formatter(form)


def log_axis(axis: Any) -> None:
    """A log axis with 1, 2 and 5 in plain figures."""
    from matplotlib import ticker

    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5), numticks=8))
    axis.set_major_formatter(ticker.FuncFormatter(plain))
    axis.set_minor_formatter(ticker.NullFormatter())


def time_unit(longest_ns: float) -> tuple[float, str, str]:
    """The divisor, sign and name of the unit in which a span of time reads well."""
    if longest_ns >= 600 * NS_PER_S:
        return 60.0 * NS_PER_S, "min", "minutes"
    return (float(NS_PER_S), "s", "seconds") if longest_ns >= NS_PER_S else (1e6, "ms", "milliseconds")


def plain(value: float, _: object) -> str:
    """A tick's label: 0.05, 2, 100."""
    return f"{value:g}"


def natural(name: str) -> tuple[str, int]:
    """Orders p2 before p10."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0)


def grouping(subject: Subject) -> str:
    """`by prefill`, and what is not shown."""
    return f"by {heading(subject)}" if subject.heading else subject.cut
