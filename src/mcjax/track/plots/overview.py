"""The picture of a run: latencies, what each instance did when, and how full and how busy it all was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.track.arrow import Table
from mcjax.track.plots.curves import Curve, curve, latencies
from mcjax.track.plots.hit_curves import draw_hits
from mcjax.track.plots.instances import COLOURS, activity, rows_of
from mcjax.track.plots.panels import log_axis, nothing, time_unit
from mcjax.track.plots.style import BLUE, GREEN, GREY, LINE_STYLES, ORANGE, PURPLE
from mcjax.track.run import Run
from mcjax.track.statistics import PERCENTILES
from mcjax.track.steps import COLUMNS as STEP_COLUMNS
from mcjax.track.steps import Steps, steps_of
from mcjax.track.tables import floats, integers
from mcjax.types import NS_PER_S

PANELS = {
    "height_ratios": (1, 1.3),
    "hspace": 0.3,
    "wspace": 0.14,
    "left": 0.06,
    "right": 0.94,
    "top": 0.91,
    "bottom": 0.07,
}
"""Where the panels are, as shares of the figure: working it out from their labels takes as long as drawing them."""
TIME_BINS = 600
RESIDENCY_WORDS = ("resid", "fill", "used", "occup")
QUEUE_WORDS = ("queue", "waiting", "batch")

Totals = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Times in nanoseconds, and values."""


def overview(run: Run) -> Any:
    """A `matplotlib.figure.Figure` of four panels; save it with `figure.savefig(path)`.

    Of a run of `backend=hits`, which serves no requests, its curves.
    """
    if "hits" in run.summary:
        return draw_hits(run).figure
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(13, 8), dpi=120)
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2, gridspec_kw=PANELS)
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
    summary, ttft, intervals = run.summary, latencies(run, "ttft_ns"), latencies(run, "intervals_ns")
    _distribution(panels[0, 0], curve(ttft), summary["ttft_s"], "Time to first token", "requests")
    _distribution(panels[0, 1], curve(intervals), summary["tbt_s"], "Time between tokens", "intervals")
    _activity(panels[1, 0], steps_of(run.pieces("events", *STEP_COLUMNS)))
    _gauges(panels[1, 1], _totals(run.pieces("samples", "time_ns", "metric", "value")))
    figure.suptitle(_title(run), fontsize=11)
    return figure


def _title(run: Run) -> str:
    counts = run.summary.get("requests", {})
    name = run.directory.name if run.directory else "run in memory"
    return (
        f"{name}: backend {run.summary.get('backend')}, seed {run.summary.get('seed')}, "
        f"{counts.get('completed')} of {counts.get('submitted')} requests completed"
    )


def _distribution(panel: Any, curve: Curve, spread: Mapping[str, float | None], title: str, unit: str) -> None:
    """The share of `unit` that took at most so long, with the three percentiles of the summary marked."""
    panel.set_title(title, loc="left", fontsize=10, fontweight="bold")
    panel.set_ylabel(f"share of {unit}")
    values, shares = curve
    if len(values) == 0:
        nothing(panel, f"no {unit}")
        return
    scale, sign, label = time_unit(int(values[-1]))
    panel.step(values / scale, shares, where="post", color=BLUE, linewidth=1.8)
    marks = {percent: (spread[f"p{percent}"] or 0.0) * NS_PER_S for percent in PERCENTILES}
    for (percent, mark), style in zip(marks.items(), LINE_STYLES, strict=False):
        value = mark / scale
        panel.axvline(value, color=GREY, linewidth=1, linestyle=style, label=f"p{percent}  {value:.3g} {sign}")
    if values[0] > 0 and values[-1] > 10 * max(marks[50], 1):
        panel.set_xscale("log")
        log_axis(panel.xaxis)
    else:
        panel.set_xlim(left=0)
    panel.set_ylim(0, 1.02)
    panel.set_xlabel(label)
    panel.grid(alpha=0.25)
    panel.legend(framealpha=0.95, edgecolor="none", loc="lower right", fontsize=9)


def _activity(panel: Any, steps: Steps) -> None:
    """A row an instance: how busy it was over time."""
    from matplotlib.patches import Patch

    panel.set_title("What each instance computed", loc="left", fontsize=10, fontweight="bold")
    if not steps.places:
        nothing(panel, "no steps")
        return
    end_ns = max(int(busy.ends_ns.max(initial=0)) for busy in (steps.prefill, steps.decode))
    scale, _, label = time_unit(end_ns)
    shown = rows_of(steps)
    activity(panel, steps, shown, np.linspace(0, end_ns, TIME_BINS + 1).astype(np.int64), scale)
    panel.tick_params(axis="y", labelsize=9 if len(shown) <= 16 else 6)
    hidden = f"; the first {len(shown)} of {len(steps.places)} instances" if len(steps.places) > len(shown) else ""
    panel.set_xlabel(f"run time, {label} (height: share of time busy{hidden})")
    sides = {"prefill": steps.prefill, "decode": steps.decode}
    handles = [Patch(color=COLOURS[name], label=name) for name, busy in sides.items() if len(busy.place)]
    panel.legend(handles=handles, frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1), fontsize=9)


def _gauges(panel: Any, totals: Mapping[str, Totals]) -> None:
    """Residency (left axis) and queues (right axis), summed over their sources."""
    panel.set_title("Pool and queues", loc="left", fontsize=10, fontweight="bold")
    metrics = sorted(totals)
    left = _matching(metrics, RESIDENCY_WORDS)[:2]
    right = [metric for metric in _matching(metrics, QUEUE_WORDS) if metric not in left][:2]
    if not left and not right:
        left = metrics[:2]
    if not left and not right:
        nothing(panel, "no samples")
        return
    scale, _, label = time_unit(max(int(times[-1]) for times, _ in totals.values()))
    lines: list[Any] = []
    sides = [(panel, left, (BLUE, GREEN))]
    if right:
        twin = panel.twinx() if left else panel
        twin.spines["top"].set_visible(False)
        sides.append((twin, right, (ORANGE, PURPLE)))
    for axis, names, colours in sides:
        for metric, colour, style in zip(names, colours, LINE_STYLES, strict=False):
            times, values = _thinned(*totals[metric])
            lines += axis.plot(times / scale, values, color=colour, linestyle=style, linewidth=1.5, label=metric)
        axis.set_ylabel(", ".join(f"{metric}{' (mean)' if _is_share(metric) else ' (all)'}" for metric in names))
        axis.set_ylim(bottom=0)
    panel.set_xlim(left=0)
    panel.set_xlabel(f"run time, {label}")
    panel.grid(alpha=0.25)
    panel.legend(handles=lines, framealpha=0.9, edgecolor="none", loc="upper left", fontsize=9)


def _totals(samples: Iterable[Table]) -> dict[str, Totals]:
    """For each metric over all sources, at each tick, the mean of shares and the sum of anything else."""
    ticks: dict[str, list[NDArray[np.float64]]] = {}
    for piece in samples:
        words = piece.column("metric").combine_chunks().dictionary_encode()
        codes, times, values = words.indices.to_numpy(), integers(piece, "time_ns"), floats(piece, "value")
        for code, metric in enumerate(words.dictionary.to_pylist()):
            rows = codes == code
            ticks.setdefault(metric, []).append(_by_tick(times[rows], values[rows], np.ones(int(rows.sum()))))
    found: dict[str, Totals] = {}
    for metric, parts in ticks.items():
        # A tick may begin in one piece and end in the next.
        times, sums, counts = _by_tick(*np.concatenate(parts, axis=1))
        found[metric] = times, sums / counts if _is_share(metric) else sums
    return found


def _by_tick(times: NDArray[Any], values: NDArray[np.float64], counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """`[3, ticks]`: times, sums, counts. A double holds 104 days of nanoseconds exactly."""
    ticks, index = np.unique(times, return_inverse=True)
    columns = [ticks, *(np.bincount(index, weights=each, minlength=len(ticks)) for each in (values, counts))]
    return np.stack(columns).astype(np.float64, copy=False)


def _thinned(times: NDArray[np.float64], values: NDArray[np.float64]) -> Totals:
    """No more than `TIME_BINS` points: each is the mean of as many ticks."""
    ticks = -(-len(times) // TIME_BINS)
    firsts = np.arange(0, len(times), ticks)
    return times[firsts], np.add.reduceat(values, firsts) / np.diff(firsts, append=len(times))


def _is_share(metric: str) -> bool:
    return metric.endswith(("_share", "_rate", "_fill"))


def _matching(metrics: list[str], words: tuple[str, ...]) -> list[str]:
    return [metric for metric in metrics if any(word in metric for word in words)]
