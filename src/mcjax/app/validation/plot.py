"""The picture of a validation: errors by load, and the distributions of both sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.app.validation.comparison import FIGURES, WITHIN, Row
from mcjax.track.plots.style import BLUE, GREY, ORANGE
from mcjax.track.run import Run

Sides = Mapping[str, Mapping[str, Sequence[Run]]]
"""By load and side (`real`, `simulated`, `own_costs`): the runs."""

LINES = {
    "real": ("real", BLUE, "-"),
    "simulated": ("simulated", ORANGE, "-"),
    "own_costs": ("with the run's own step times", GREY, "--"),
}


def plot(found: Sequence[Row], sides: Sides) -> Any:
    """A `matplotlib.figure.Figure`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    loads = list(sides)
    figure: Any = Figure(figsize=(max(9.0, 3.2 * len(loads)), 10), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(3, len(loads))
    _errors(figure.add_subplot(grid[0, :]), found, loads)
    for column, load in enumerate(loads):
        for line, (title, values) in enumerate((("TTFT", ttft_s), ("TBT", tbt_s)), start=1):
            panel = figure.add_subplot(grid[line, column])
            for side, (label, color, style) in LINES.items():
                seconds = np.sort(np.concatenate([values(run) for run in sides[load][side]]))
                share = np.arange(1, len(seconds) + 1) / len(seconds)
                panel.plot(seconds * 1e3, share, color=color, linestyle=style, label=label, linewidth=1.4)
            panel.set_xscale("log")
            panel.xaxis.set_major_formatter("{x:g}")
            panel.xaxis.set_minor_formatter("")
            panel.set_title(f"{title}, load {load}", loc="left", fontsize=10, fontweight="bold")
            panel.set_xlabel("ms")
            panel.spines[["top", "right"]].set_visible(False)
            if column == 0:
                panel.set_ylabel("share of requests" if title == "TTFT" else "share of intervals")
                panel.legend(frameon=False, fontsize=8)
    return figure


def _errors(panel: Any, found: Sequence[Row], loads: Sequence[str]) -> None:
    """Bars by load, a colour a figure; solid as predicted, pale with the run's own step times."""
    width = 0.8 / len(FIGURES)
    for number, (name, (_, _, title)) in enumerate(FIGURES.items()):
        own = [next(row for row in found if row.load == load and row.figure == name) for load in loads]
        places = np.arange(len(loads)) + (number - (len(FIGURES) - 1) / 2) * width
        panel.bar(places, [100 * row.error for row in own], width * 0.9, color=f"C{number}", label=title)
        panel.scatter(places, [100 * row.own_error for row in own], s=22, color="black", marker="_", zorder=3)
    for bound in (-100 * WITHIN, 100 * WITHIN):
        panel.axhline(bound, color=GREY, linewidth=0.8, linestyle="--")
    panel.axhline(0, color=GREY, linewidth=1)
    panel.set_yscale("symlog", linthresh=50)
    ticks = (-50, -20, -10, 0, 10, 20, 50, 100, 200, 500, 1000)
    panel.set_yticks(ticks, [f"{tick:+d}" if tick else "0" for tick in ticks])
    panel.minorticks_off()
    panel.set_xticks(range(len(loads)), [load if load == "saturated" else f"load {load}" for load in loads])
    panel.set_ylabel("simulated over real, %")
    panel.set_title("Error (dashes: with the run's own step times)", loc="left", fontsize=10, fontweight="bold")
    panel.legend(frameon=False, fontsize=8, ncols=len(FIGURES), loc="lower right", bbox_to_anchor=(1, 1))
    panel.spines[["top", "right"]].set_visible(False)


def ttft_s(run: Run) -> NDArray[np.float64]:
    rows = run.requests.select(["ttft_ns"]).to_pydict()["ttft_ns"]
    return np.array([ns for ns in rows if ns is not None], np.float64) / 1e9


def tbt_s(run: Run) -> NDArray[np.float64]:
    rows = run.requests.select(["intervals_ns"]).to_pydict()["intervals_ns"]
    return np.array([ns for intervals in rows for ns in intervals], np.float64) / 1e9
