"""`pareto`: two figures of whole runs against each other, and which groups no other beats in both."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import numpy as np

from mcjax.errors import ConfigError
from mcjax.track.metrics import CATALOGUE, Metric
from mcjax.track.plots.bands import scalar_band
from mcjax.track.plots.drawn import Drawn
from mcjax.track.plots.kind import Kind
from mcjax.track.plots.panels import Values, grouping, nothing, share_axis, table
from mcjax.track.plots.style import BLUE, GREY, INK, LOOKS, SMALL_PT, new_figure
from mcjax.track.plots.subject import Subject

DEFAULT = ("ttft_s.p90", "tbt_s.p90")
MOST_POINTS = 40
HEIGHT_IN = 2.3
Bands = tuple[Values, Values, Values]
"""Means of the groups, and the ends of their intervals."""
MOVES = ((5, 4, "left"), (5, -9, "left"), (-5, 4, "right"), (-5, -9, "right"), (0, 8, "center"), (0, -13, "center"))
"""Where a label may stand, in points from its point, best first."""


def draw(subject: Subject) -> Drawn:
    shown = subject.first(MOST_POINTS)
    across, up = (_metric(axis, shown.options.get(axis, default)) for axis, default in zip("xy", DEFAULT, strict=True))
    x, y = (_bands(shown, each) for each in (across, up))
    figure = new_figure(shown.width_in, HEIGHT_IN if shown.width == "column" else 3.2)
    panel: Any = figure.subplots()
    there = np.isfinite(x[0]) & np.isfinite(y[0])
    best = front(x[0], y[0], across, up)
    shown_x, shown_y = _shown(across, x), _shown(up, y)
    for index in np.flatnonzero(there).tolist():
        look = LOOKS[index % len(LOOKS)]
        panel.errorbar(
            shown_x[0][index],
            shown_y[0][index],
            xerr=_ends(shown_x, index),
            yerr=_ends(shown_y, index),
            color=look.colour,
            marker=look.marker,
            markerfacecolor=look.colour if best[index] else "white",
            markersize=5,
            linewidth=0.8,
            capsize=1.5,
            zorder=4,
        )
    panel.set_xlabel(_axis_name(across, x))
    panel.set_ylabel(_axis_name(up, y))
    if there.any():
        _front_line(panel, shown_x[0][best], shown_y[0][best], across)
        _room(panel, across, up)
        _labels(
            figure, panel, shown.labels, shown_x[0], shown_y[0], grouping(shown)
        )  # last: what else there is takes its room
    else:
        nothing(panel, "no figures")
    columns: dict[str, Any] = {}
    for each, values in ((across, x), (up, y)):
        columns |= {each.name: values[0], f"{each.name}.low": values[1], f"{each.name}.high": values[2]}
    repetitions = [len(group.runs) for group in shown.groups]
    data = table(group=list(shown.labels), **columns, on_front=best.tolist(), repetitions=repetitions)
    return Drawn(figure, data)


def _metric(axis: str, name: str) -> Metric:
    if name not in CATALOGUE:
        close = difflib.get_close_matches(name, CATALOGUE, 1)
        hint = f", did you mean {close[0]}" if close else ""
        raise ConfigError(axis, name, f"no such metric{hint}", CATALOGUE)
    return CATALOGUE[name]


def front(x: Values, y: Values, across: Metric, up: Metric) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """`[N]`: whether no other point is as good in both and better in one. What is missing is never on the front."""
    signed_x, signed_y = (-values if each.better == "higher" else values for values, each in ((x, across), (y, up)))
    as_good = (signed_x[:, None] <= signed_x) & (signed_y[:, None] <= signed_y)
    better = (signed_x[:, None] < signed_x) | (signed_y[:, None] < signed_y)
    return np.isfinite(x) & np.isfinite(y) & ~(as_good & better).any(axis=0)


def _bands(subject: Subject, each: Metric) -> Bands:
    bands = [scalar_band([each.of(run.summary) for run in group.runs.values()]) for group in subject.groups]
    mean, low, high = np.array(bands, np.float64).T
    return mean, low, high


def _ends(band: Bands, index: int) -> Any:
    mean, low, high = (values[index] for values in band)
    return [[mean - low], [high - mean]] if np.isfinite(low) else None


def _front_line(panel: Any, x: Values, y: Values, across: Metric) -> None:
    """Steps between the points of the front: what lies behind them is beaten."""
    order = np.argsort(x)
    where = "post" if across.better != "higher" else "pre"
    if len(x) > 1:
        panel.step(x[order], y[order], where=where, color=GREY, linewidth=0.9, linestyle="--", zorder=1)


def _room(panel: Any, across: Metric, up: Metric) -> None:
    """Room for labels, and an arrow's words in the corner that is best."""
    panel.margins(x=0.22, y=0.2)
    right, high = across.better == "higher", up.better == "higher"
    panel.annotate(
        "better",
        (0.98 if right else 0.02, 0.98 if high else 0.02),
        xycoords="axes fraction",
        ha="right" if right else "left",
        va="top" if high else "bottom",
        fontsize=SMALL_PT,
        fontstyle="italic",
        color=GREY,
    )
    for each, axis in ((across, panel.xaxis), (up, panel.yaxis)):
        if each.unit == "share":
            share_axis(axis)


def _labels(figure: Any, panel: Any, labels: Sequence[str], x: Values, y: Values, grouped: str) -> None:
    """Each name beside its point, where it hides nothing; a number where there is no room, explained below."""
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    bounds = panel.get_window_extent(renderer)
    radius = 3.5 * figure.dpi / 72
    there = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    centres = panel.transData.transform(np.column_stack([x[there], y[there]]))
    taken = [_box(cx - radius, cy - radius, cx + radius, cy + radius) for cx, cy in centres]
    unplaced: list[tuple[int, Any]] = []
    for index in there.tolist():
        text = panel.annotate(
            labels[index], (x[index], y[index]), (0, 0), textcoords="offset points", fontsize=SMALL_PT, color=INK
        )
        text.set_in_layout(False)
        for dx, dy, side in MOVES:
            text.set_position((dx, dy))
            text.set_horizontalalignment(side)
            box = text.get_window_extent(renderer)
            inside = bounds.x0 <= box.x0 and box.x1 <= bounds.x1 and bounds.y0 <= box.y0 and box.y1 <= bounds.y1
            if inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
        else:
            unplaced.append((index, text))
    for number, (index, text) in enumerate(unplaced, start=1):
        text.set_text(str(number))
        text.set_position((4, 3))
        text.set_horizontalalignment("left")
        text.set_color(BLUE)
        text.set_gid(f"label-{index}")
    if not unplaced:
        figure.supxlabel(grouped, fontsize=SMALL_PT)
        return
    from matplotlib.lines import Line2D

    names = [f"{number}  {labels[index]}" for number, (index, _) in enumerate(unplaced, start=1)]
    handles = [Line2D([], [], linestyle="") for _ in names]
    columns = 1 if max(map(len, names)) > 24 else 2
    figure.set_figheight(figure.get_figheight() + 0.15 * -(-len(names) // columns) + 0.1)
    figure.legend(
        handles=handles,
        labels=names,
        title=grouped,
        loc="outside lower left",
        ncols=columns,
        handlelength=0,
        alignment="left",
    )


def _box(x0: float, y0: float, x1: float, y1: float) -> Any:
    from matplotlib.transforms import Bbox

    return Bbox([[x0, y0], [x1, y1]])


def _shown(each: Metric, band: Bands) -> Bands:
    """Milliseconds, where seconds would all be small fractions."""
    mean, low, high = (1e3 * values if _in_ms(each, band) else values for values in band)
    return mean, low, high


def _in_ms(each: Metric, band: Bands) -> bool:
    return each.unit == "s" and not (band[0] >= 1).any()


def _axis_name(each: Metric, band: Bands) -> str:
    units = {"s": ", ms" if _in_ms(each, band) else ", s", "1/s": ", 1/s", "B": ", bytes"}
    return f"{each.label}{units.get(each.unit, '')}"


KIND = Kind(
    "pareto",
    "Trade-off",
    "A point a group. Those on the dashed front are filled: no other group is as good in both and better in one. Front "
    "and points are of the means; where the intervals of two points overlap, their order is not established.",
    draw,
    ("x", "y"),
)
