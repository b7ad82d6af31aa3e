"""The picture of a workload: lengths, arrivals over time, reuse against cache size, and the time between uses."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.types import NS_PER_S
from mcjax.workload.analysis import Played, Reuse, lru_hit, reuse

# Okabe and Ito's palette: told apart by every kind of colour vision.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
CURVE_POINTS = 1000
TIME_BINS = 200
CAPACITIES = 60


def picture(played: Played, facts: dict[str, Any]) -> Any:
    """A `matplotlib.figure.Figure` of four panels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(12, 7.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2)
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
    found = reuse(played)
    _lengths(panels[0, 0], played)
    _arrivals(panels[0, 1], played)
    _capacity(panels[1, 0], played, found)
    _gaps(panels[1, 1], found)
    load = f"; prefill keeps {facts['offered_load']:.2f} instances busy" if "offered_load" in facts else ""
    title = f"{facts['workload']}: {facts['requests']:,} requests in {facts['duration_s']:,.0f} s{load}"
    figure.suptitle(title, fontsize=11)
    return figure


def _curve(panel: Any, values: NDArray[Any], label: str, colour: str) -> None:
    """The share of values up to each one."""
    if len(values) == 0:
        return
    shares = np.linspace(0, 1, CURVE_POINTS)
    panel.plot(np.quantile(values, shares, method="inverted_cdf"), shares, label=label, color=colour)


def _lengths(panel: Any, played: Played) -> None:
    _curve(panel, played.input_tokens, "prompt", BLUE)
    _curve(panel, played.output_tokens, "answer", ORANGE)
    panel.set(title="Lengths", xlabel="tokens", ylabel="share of requests up to it", xscale="log")
    panel.legend(frameon=False)


def _arrivals(panel: Any, played: Played) -> None:
    times_s = played.arrival_ns / NS_PER_S
    if len(times_s) == 0 or times_s.max() == times_s.min():
        panel.set(title="Arrivals: all at once", xlabel="seconds")
        return
    edges: NDArray[np.float64] = np.linspace(float(times_s.min()), float(times_s.max()), TIME_BINS + 1)
    width_s = edges[1] - edges[0]
    requests = np.histogram(times_s, edges)[0] / width_s
    tokens = np.histogram(times_s, edges, weights=played.input_tokens.astype(np.float64))[0] / width_s
    panel.step(edges[:-1], requests, where="post", color=BLUE)
    panel.set(title="Arrivals", xlabel="seconds", ylim=(0, None))
    panel.set_ylabel("requests a second", color=BLUE)
    beside = panel.twinx()
    beside.step(edges[:-1], tokens, where="post", color=ORANGE, alpha=0.6)
    beside.set_ylabel("prompt tokens a second", color=ORANGE)
    beside.set_ylim(0, None)
    beside.spines["top"].set_visible(False)


def _capacity(panel: Any, played: Played, found: Reuse) -> None:
    """What one LRU cache that sees everything would hit."""
    capacities = np.unique(np.geomspace(1, max(2, found.unique), CAPACITIES).round().astype(np.int64))
    hits = [lru_hit(found, capacity) for capacity in capacities.tolist()]
    panel.plot(capacities * played.block_size, hits, color=GREEN, label="one LRU cache of that size")
    panel.axhline(
        found.block_hit, color="#777777", linestyle="--", label=f"infinite cache: {100 * found.block_hit:.1f} %"
    )
    panel.set(title="Hits", xlabel="cache size, tokens", ylabel="share of full blocks", xscale="log", ylim=(0, 1))
    panel.legend(frameon=False)


def _gaps(panel: Any, found: Reuse) -> None:
    _curve(panel, np.maximum(found.gap_s, 1e-3), "", GREEN)
    panel.set(
        title="Time since the last use of a block", xlabel="seconds", ylabel="share of reuses up to it", xscale="log"
    )
