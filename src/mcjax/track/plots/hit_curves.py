"""What `kind=hit_rate` and `overview.png` show of a run of `backend=hits`: hits over the pool's capacity, by policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from mcjax.track.plots.drawn import Drawn
from mcjax.track.plots.panels import share_axis, table
from mcjax.track.plots.style import COLUMN_IN, INK, LOOKS, PAGE_IN, new_figure, styled
from mcjax.track.run import Run

BOUND = "belady"
PAPER = "LRU, as published"
NOTE = (
    "The share of all prompt tokens that one pool holds when their request comes, by the pool's capacity: one request "
    "at a time, full blocks only. The dashed line knows the future: no policy finds more blocks. Open circles "
    "are what FAST'25 publishes for LRU (Fig 9)."
)
PANEL_IN = 2.4
Rows = Sequence[Mapping[str, Any]]


def draw_hits(run: Run, width_in: float = PAGE_IN) -> Drawn:
    """One panel a trace; beside each other on a page, one above the other in a column."""
    hits: Mapping[str, Any] = run.summary["hits"]
    rows, published = cast("Rows", hits["rows"]), cast("Rows", hits["published"])
    traces = list(dict.fromkeys(str(row["trace"]) for row in rows))
    policies = list(dict.fromkeys(str(row["policy"]) for row in rows))
    columns = min(len(traces), 2) if width_in > COLUMN_IN else 1
    lines = max(1, math.ceil(len(traces) / max(columns, 1)))
    with styled():
        figure = new_figure(width_in, lines * PANEL_IN + 0.55)
        panels = list(figure.subplots(lines, max(columns, 1), squeeze=False, sharey=True).flat)
        for panel, trace in zip(panels, traces, strict=False):
            _panel(
                panel,
                trace,
                policies,
                *([row for row in part if row["trace"] == trace] for part in (rows, published)),
            )
        highest = max((row["hit_rate"] for row in (*rows, *published)), default=0.0)
        panels[0].set_ylim(0, max(0.05, min(1.02, 1.05 * highest)))  # of all: they share the axis
        for panel in panels[len(traces) :]:
            panel.remove()
        for index, panel in enumerate(panels[: len(traces)]):
            if index % max(columns, 1) == 0:
                panel.set_ylabel("prompt tokens found")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5 if columns == 2 else 3)
    shown = [*rows, *({**row, "policy": PAPER} for row in published)]
    names = list(rows[0]) if rows else []
    return Drawn(figure, table(**{name: [row.get(name) for row in shown] for name in names}), title="Hits by capacity")


def _panel(panel: Any, trace: str, policies: Sequence[str], rows: Rows, published: Rows) -> None:
    online = [policy for policy in policies if policy != BOUND]
    for index, policy in enumerate(online):
        look = LOOKS[index % (len(LOOKS) - 1)]  # the last one's ink is the bound's
        own = [row for row in rows if row["policy"] == policy]
        panel.plot(*_points(own), color=look.colour, marker=look.marker, linewidth=1.0, markersize=2.8, label=policy)
    if len(online) < len(policies):
        bound = [row for row in rows if row["policy"] == BOUND]
        panel.plot(*_points(bound), color=INK, linestyle="--", linewidth=1.2, label=f"{BOUND} (bound)", zorder=4)
    if published:
        panel.plot(
            *_points(published),
            linestyle="",
            marker="o",
            markersize=6,
            markerfacecolor="none",
            markeredgecolor=INK,
            markeredgewidth=0.8,
            label=PAPER,
            zorder=5,
        )
    panel.set_title(trace)
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter(_tokens)
    panel.set_xlabel("capacity, tokens")
    share_axis(panel.yaxis)


def _tokens(value: float, _: object) -> str:
    return f"{value / 1e6:g} M" if value >= 1e6 else f"{value / 1e3:g} k"


def _points(rows: Rows) -> tuple[list[float], list[float]]:
    ordered = sorted(rows, key=lambda row: row["capacity_tokens"])
    return [row["capacity_tokens"] for row in ordered], [row["hit_rate"] for row in ordered]
