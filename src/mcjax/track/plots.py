"""The picture of a run: latencies, what each instance did when, and how full and how busy it all was."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.track.arrow import Table, arrow, compute
from mcjax.track.run import Run
from mcjax.track.statistics import merge, overlap_ns
from mcjax.track.tables import chosen, floats, integers
from mcjax.types import NS_PER_S

# Okabe and Ito's palette: told apart by every kind of colour vision.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#777777"
LINE_STYLES = ("-", "--", ":", "-.")

CURVE_POINTS = 2000
TIME_BINS = 600
MOST_INSTANCES = 32
RESIDENCY_WORDS = ("resid", "fill", "used", "occup")
QUEUE_WORDS = ("queue", "waiting", "batch")


def overview(run: Run) -> Any:
    """A `matplotlib.figure.Figure` of four panels; save it with `figure.savefig(path)`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(13, 8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2, gridspec_kw={"height_ratios": (1, 1.3)})
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
    intervals = compute().list_flatten(run.requests.column("intervals_ns")).to_numpy()
    _distribution(
        panels[0, 0], run.requests.column("ttft_ns").drop_null().to_numpy(), "Time to first token", "requests"
    )
    _distribution(panels[0, 1], intervals, "Time between tokens", "intervals")
    _activity(panels[1, 0], run.events)
    _gauges(panels[1, 1], run.samples)
    figure.suptitle(_title(run), fontsize=11)
    return figure


def _title(run: Run) -> str:
    counts = run.summary.get("requests", {})
    name = run.directory.name if run.directory else "run in memory"
    return (
        f"{name}: backend {run.summary.get('backend')}, seed {run.summary.get('seed')}, "
        f"{counts.get('completed')} of {counts.get('submitted')} requests completed"
    )


def _distribution(panel: Any, values_ns: NDArray[np.int64], title: str, unit: str) -> None:
    """The share of `unit` that took at most so long, with the three percentiles of the summary marked."""
    from matplotlib import ticker

    panel.set_title(title, loc="left", fontsize=10, fontweight="bold")
    panel.set_ylabel(f"share of {unit}")
    if len(values_ns) == 0:
        _nothing(panel, f"no {unit}")
        return
    ordered = np.sort(values_ns)
    ranks = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), CURVE_POINTS)).round().astype(np.int64))
    scale, sign, label = _unit(int(ordered[-1]))
    shares = (ranks + 1) / len(ordered)
    panel.step(ordered[ranks] / scale, shares, where="post", color=BLUE, linewidth=1.8)
    for percent, style in zip((50, 90, 99), LINE_STYLES, strict=False):
        value = float(np.percentile(ordered, percent)) / scale
        panel.axvline(value, color=GREY, linewidth=1, linestyle=style, label=f"p{percent}  {value:.3g} {sign}")
    positive = int(ordered[0]) > 0
    if positive and ordered[-1] > 10 * max(int(np.percentile(ordered, 50)), 1):
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter(ticker.FuncFormatter(_plain))
        panel.xaxis.set_minor_formatter(ticker.NullFormatter())
    else:
        panel.set_xlim(left=0)
    panel.set_ylim(0, 1.02)
    panel.set_xlabel(label)
    panel.grid(alpha=0.25)
    panel.legend(framealpha=0.95, edgecolor="none", loc="lower right", fontsize=9)


def _activity(panel: Any, events: Table) -> None:
    """A row an instance: how busy it was over time; prefill grows up from the row's line, decode down."""
    panel.set_title("What each instance computed", loc="left", fontsize=10, fontweight="bold")
    prefill, decode = ("prefill_step", "mixed_step"), ("decode_step", "mixed_step")
    steps = _where(events, "kind", (*prefill, *decode))
    if steps.num_rows == 0:
        _nothing(panel, "no steps")
        return
    start, end = integers(steps, "start_ns"), integers(steps, "time_ns")
    computes = {name: chosen(steps, "kind", kinds) for name, kinds in (("prefill", prefill), ("decode", decode))}
    names = steps.column("place").to_pylist()
    prefills = set(np.array(names, dtype=np.str_)[computes["prefill"]].tolist())
    places = sorted(set(names), key=lambda place: (place not in prefills, *_natural(place)))
    shown = places[:MOST_INSTANCES]
    edges = np.linspace(0, int(end.max()), TIME_BINS + 1).astype(np.int64)
    scale, _, label = _unit(int(end.max()))
    labelled: set[str] = set()
    for row, place in enumerate(shown):
        here = chosen(steps, "place", [place])
        phases = [name for name, does in computes.items() if (here & does).any()]
        for name in phases:
            mask = here & computes[name]
            busy = overlap_ns(edges[:-1], edges[1:], merge(start[mask], end[mask])) / np.maximum(np.diff(edges), 1)
            # One phase has the whole row; two share it, back to back.
            line, height = (row + 0.42, -0.84) if len(phases) == 1 else (row, -0.42 if name == "prefill" else 0.42)
            panel.fill_between(
                edges[:-1] / scale,
                np.full(TIME_BINS, line),
                line + height * busy,
                step="post",
                color=BLUE if name == "prefill" else ORANGE,
                linewidth=0,
                label=None if name in labelled else name,
            )
            labelled.add(name)
    panel.set_ylim(max(len(shown), 2) - 0.4, -0.6)
    panel.set_yticks(range(len(shown)), shown, fontsize=9 if len(shown) <= 16 else 6)
    panel.set_xlim(0, edges[-1] / scale)
    hidden = f"; the first {len(shown)} of {len(places)} instances" if len(places) > len(shown) else ""
    panel.set_xlabel(f"run time, {label} (height: share of time busy{hidden})")
    panel.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1), fontsize=9)


def _gauges(panel: Any, samples: Table) -> None:
    """Residency (left axis) and queues (right axis), summed over their sources."""
    panel.set_title("Pool and queues", loc="left", fontsize=10, fontweight="bold")
    metrics = sorted(compute().unique(samples.column("metric")).to_pylist())
    left = _matching(metrics, RESIDENCY_WORDS)[:2]
    right = [metric for metric in _matching(metrics, QUEUE_WORDS) if metric not in left][:2]
    if not left and not right:
        left = metrics[:2]
    if not left and not right:
        _nothing(panel, "no samples")
        return
    scale, _, label = _unit(int(integers(samples, "time_ns").max()))
    lines: list[Any] = []
    sides = [(panel, left, (BLUE, GREEN))]
    if right:
        twin = panel.twinx() if left else panel
        twin.spines["top"].set_visible(False)
        sides.append((twin, right, (ORANGE, PURPLE)))
    for axis, names, colours in sides:
        for metric, colour, style in zip(names, colours, LINE_STYLES, strict=False):
            times, totals = _total(samples, metric)
            lines += axis.plot(times / scale, totals, color=colour, linestyle=style, linewidth=1.5, label=metric)
        axis.set_ylabel(", ".join(f"{metric}{' (mean)' if _is_share(metric) else ' (all)'}" for metric in names))
        axis.set_ylim(bottom=0)
    panel.set_xlim(left=0)
    panel.set_xlabel(f"run time, {label}")
    panel.grid(alpha=0.25)
    panel.legend(handles=lines, framealpha=0.9, edgecolor="none", loc="upper left", fontsize=9)


def _total(samples: Table, metric: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """`(times, values)`: over all sources at each tick, the mean of shares and the sum of anything else."""
    rows = _where(samples, "metric", [metric])
    times, index = np.unique(integers(rows, "time_ns"), return_inverse=True)
    totals = np.bincount(index, weights=floats(rows, "value"), minlength=len(times)).astype(np.float64)
    return times, totals / np.bincount(index, minlength=len(times)) if _is_share(metric) else totals


def _where(table: Table, column: str, words: Iterable[str]) -> Table:
    """The rows whose text column holds one of `words`."""
    return table.filter(arrow().array(chosen(table, column, words)))


def _is_share(metric: str) -> bool:
    return metric.endswith(("_share", "_rate", "_fill"))


def _matching(metrics: list[str], words: tuple[str, ...]) -> list[str]:
    return [metric for metric in metrics if any(word in metric for word in words)]


def _unit(longest_ns: int) -> tuple[float, str, str]:
    """The divisor, sign and name of the unit in which a span of time reads well."""
    if longest_ns >= 600 * NS_PER_S:
        return 60.0 * NS_PER_S, "min", "minutes"
    return (float(NS_PER_S), "s", "seconds") if longest_ns >= NS_PER_S else (1e6, "ms", "milliseconds")


def _natural(name: str) -> tuple[str, int]:
    """Orders p2 before p10."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0)


def _nothing(panel: Any, what: str) -> None:
    panel.text(0.5, 0.5, what, transform=panel.transAxes, ha="center", va="center", color=GREY)


def _plain(value: float, _: object) -> str:
    """A tick's label: 0.05, 2, 100."""
    return f"{value:g}"
