"""`links`: bytes on the move, and which ways they took."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.track.arrow import arrow
from mcjax.track.levels import FULL
from mcjax.track.plots.drawn import Drawn
from mcjax.track.plots.gauges import binned, counters, period_ns
from mcjax.track.plots.kind import Kind
from mcjax.track.plots.over_time import Edges, Quantities, edges_of, over_time, present
from mcjax.track.plots.panels import MOST_LINES, joined, natural, nothing, table, time_axis
from mcjax.track.plots.style import SMALL_PT, new_figure
from mcjax.track.plots.subject import Subject, without_rows
from mcjax.track.run import Run
from mcjax.track.tables import chosen, integers
from mcjax.types import NS_PER_S

MOST_WAYS = 16
GB = 1e9
ROW_IN = 0.13


def draw(subject: Subject) -> Drawn:
    if len(subject.groups) == 1 and len(subject.groups[0].runs) == 1:
        return _of_one(subject, subject.groups[0].first)
    return over_time(subject, _read, period_ns(subject.first(MOST_LINES), KIND.name))


def _read(run: Run, edges: Edges) -> Quantities:
    """For each transport, its bytes a second, and those that wait."""
    seconds = np.diff(edges) / NS_PER_S
    found: dict[str, Any] = {}
    for name, grown in counters(run, "moved_bytes", edges).items():
        found[f"{name}, GB/s"] = (grown / seconds / GB)[None, :]
    sources, waiting = binned(run, ["pending_bytes"], edges)["pending_bytes"]
    for name, values in zip(sources, waiting, strict=True):
        found[f"{name}, GB under way or waiting"] = values[None, :] / GB
    return {title: found[title] for title in sorted(found, key=lambda title: (not title.endswith("/s"), title))}


def _of_one(subject: Subject, run: Run) -> Drawn:
    """Over time, the transports' rates above, and below them each way's, the busiest first."""
    edges = edges_of(subject, period_ns(subject, KIND.name))
    without_rows(run, KIND.name, "the events of transfers", FULL)  # of a run cut by its budget there are a few
    ways, flows = flows_of(run, edges)
    rates = {title: values[0] for title, values in _read(run, edges).items() if title.endswith("GB/s")}
    shown, rows = ways[:MOST_WAYS], max(len(ways[:MOST_WAYS]), 3)
    figure = new_figure(subject.width_in, 0.5 + 0.85 * len(rates) + ROW_IN * rows + 0.45)
    heights = [0.85] * len(rates) + [ROW_IN * rows]
    grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    panels = list(grid.flat)
    scale = time_axis(panels, int(edges[0]), int(edges[-1]))
    middles = (edges[:-1] + edges[1:]) / 2
    tables: list[Any] = []
    for index, ((title, values), panel) in enumerate(zip(rates.items(), panels, strict=False)):
        there = np.isfinite(values)
        panel.plot(middles[there] / scale, values[there], color=subject.look(index).colour)
        panel.set_ylim(bottom=0)
        panel.set_title(title)
        name = title.removesuffix(", GB/s")
        tables.append(table(way=name, time_s=middles[there] / NS_PER_S, gb_per_s=values[there]))
    _ways(figure, panels[-1], shown, flows, edges / scale, len(ways))
    tables += [table(way=way, time_s=middles / NS_PER_S, gb_per_s=row) for way, row in zip(shown, flows, strict=False)]
    return Drawn(figure, joined(tables) if tables else table(way="", time_s=np.zeros(0), gb_per_s=np.zeros(0)))


def flows_of(run: Run, edges: Edges) -> tuple[list[str], NDArray[np.float64]]:
    """Ways between nodes and between tiers (`p0 > d1`, `p0 hbm > dram`), the busiest first, and `[ways, bins]` GB/s.

    The bytes of a transfer are spread evenly over its time.
    """
    begins: dict[str, list[NDArray[np.int64]]] = {}
    for piece in run.pieces("events", "kind", "place", "tier", "start_ns", "time_ns", "bytes"):
        rows = piece.filter(arrow().array(chosen(piece, "kind", ["transfer"])))
        names = np.array(
            [
                _way(place, tier)
                for place, tier in zip(rows["place"].to_pylist(), rows["tier"].to_pylist(), strict=True)
            ],
            dtype=object,
        )
        columns = np.stack([integers(rows, column) for column in ("start_ns", "time_ns", "bytes")])
        for name in dict.fromkeys(names.tolist()):
            begins.setdefault(name, []).append(columns[:, names == name])
    flows: dict[str, NDArray[np.float64]] = {}
    totals: dict[str, int] = {}
    for name, parts in begins.items():
        columns = np.concatenate(parts, axis=1)
        nbytes, start_ns = columns[2], columns[0].copy()
        start_ns[start_ns < 0] = columns[1][start_ns < 0]  # a transfer that took no time
        end_ns = np.maximum(columns[1], start_ns + 1)
        flows[name] = present(start_ns, end_ns, nbytes / (end_ns - start_ns), edges)  # bytes a nanosecond are GB/s
        totals[name] = int(nbytes.sum())
    order = sorted(flows, key=lambda name: (-totals[name], natural(name)))
    return order, np.array([flows[name] for name in order]).reshape(len(order), len(edges) - 1)


def _way(place: str, tier: str) -> str:
    sender, _, receiver = place.replace("node-", "").partition(">")
    return f"{sender} > {receiver}" if sender != receiver else f"{sender} {tier.replace('>', ' > ')}"


def _ways(figure: Any, panel: Any, ways: list[str], flows: NDArray[np.float64], x: Any, of: int) -> None:
    panel.set_title(f"each way, the {len(ways)} busiest of {of}" if of > len(ways) else "each way")
    panel.grid(visible=False)
    if not ways:
        nothing(panel, "no transfers")
        panel.set_yticks([])
        return
    mesh = panel.pcolormesh(
        x, np.arange(len(ways) + 1) - 0.5, flows[: len(ways)], cmap="cividis", vmin=0, rasterized=True
    )
    panel.set_ylim(len(ways) - 0.5, -0.5)
    panel.set_yticks(range(len(ways)), ways, fontsize=SMALL_PT - 1)
    bar = figure.colorbar(mesh, ax=panel, pad=0.01, fraction=0.05, aspect=25)
    bar.ax.set_title("GB/s", fontsize=SMALL_PT - 1, loc="center")
    bar.ax.tick_params(labelsize=SMALL_PT - 1)
    bar.outline.set_linewidth(0.5)


KIND = Kind(
    "links",
    "Bytes on the move",
    "Bytes a second over time by transport. Of a single run also each way, the busiest first: between nodes, and in a "
    "node between its tiers; of several, what is under way or waits.",
    draw,
    ("from_s", "to_s"),
)
