"""The picture of a run: latencies, what each instance did when, and how full and how busy it all was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.track.arrow import Table, compute
from mcjax.track.plots.style import BLUE, GREEN, GREY, LINE_STYLES, ORANGE, PURPLE
from mcjax.track.run import Run
from mcjax.track.statistics import PERCENTILES, overlap_ns
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
CURVE_POINTS, CURVE_BITS = 500, 10
TIME_BINS = 600
MOST_INSTANCES = 32
RESIDENCY_WORDS = ("resid", "fill", "used", "occup")
QUEUE_WORDS = ("queue", "waiting", "batch")

Curve = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Values in nanoseconds, and the share of all that are at most so large."""
Totals = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Times in nanoseconds, and values."""


def overview(run: Run) -> Any:
    """A `matplotlib.figure.Figure` of four panels; save it with `figure.savefig(path)`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(13, 8), dpi=120)
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2, gridspec_kw=PANELS)
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
    summary, ttft, intervals = run.summary, _of_window(run, "ttft_ns"), _of_window(run, "intervals_ns")
    _distribution(panels[0, 0], _curve(ttft), summary["ttft_s"], "Time to first token", "requests")
    _distribution(panels[0, 1], _curve(intervals), summary["tbt_s"], "Time between tokens", "intervals")
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


def _of_window(run: Run, column: str) -> Iterator[NDArray[np.int64]]:
    """The latencies of the requests that the summary counts."""
    begin_ns = round((run.summary["duration_s"] - run.summary["window_s"]) * NS_PER_S)
    for piece in run.pieces("requests", "arrival_ns", column):
        cells = piece.filter(compute().greater_equal(piece.column(0), begin_ns)).column(1)
        yield (compute().list_flatten(cells) if column == "intervals_ns" else cells.drop_null()).to_numpy()


def _distribution(panel: Any, curve: Curve, spread: Mapping[str, float | None], title: str, unit: str) -> None:
    """The share of `unit` that took at most so long, with the three percentiles of the summary marked."""
    from matplotlib import ticker

    panel.set_title(title, loc="left", fontsize=10, fontweight="bold")
    panel.set_ylabel(f"share of {unit}")
    values, shares = curve
    if len(values) == 0:
        _nothing(panel, f"no {unit}")
        return
    scale, sign, label = _unit(int(values[-1]))
    panel.step(values / scale, shares, where="post", color=BLUE, linewidth=1.8)
    marks = {percent: (spread[f"p{percent}"] or 0.0) * NS_PER_S for percent in PERCENTILES}
    for (percent, mark), style in zip(marks.items(), LINE_STYLES, strict=False):
        value = mark / scale
        panel.axvline(value, color=GREY, linewidth=1, linestyle=style, label=f"p{percent}  {value:.3g} {sign}")
    if values[0] > 0 and values[-1] > 10 * max(marks[50], 1):
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


def _curve(pieces: Iterable[NDArray[np.int64]]) -> Curve:
    """`(values, shares)`: the share of all values that is at most so large, within a thousandth of the value.

    Values are counted by the leading bits of their doubles: exponent and `CURVE_BITS` of the mantissa.
    """
    dropped, one = 52 - CURVE_BITS, 1023 << CURVE_BITS  # the bin of 1 ns, and of nothing at all
    counts = np.zeros(64 << CURVE_BITS, np.int64)
    for values in pieces:
        leading = np.maximum(values, 1).astype(np.float64).view(np.int64) >> dropped
        counts += np.bincount(leading - one, minlength=len(counts))
    bins = np.flatnonzero(counts)
    if len(bins) == 0:
        return np.zeros(0), np.zeros(0)
    up_to = np.cumsum(counts[bins])
    # No more points than can be told apart, the first and the last among them.
    kept = np.unique(np.searchsorted(up_to, np.linspace(1, int(up_to[-1]), CURVE_POINTS)))
    values = np.where(bins[kept] > 0, (bins[kept] + one << dropped).view(np.float64), 0.0)
    return values, up_to[kept] / int(up_to[-1])


def _activity(panel: Any, steps: Steps) -> None:
    """A row an instance: how busy it was over time; prefill grows up from the row's line, decode down."""
    panel.set_title("What each instance computed", loc="left", fontsize=10, fontweight="bold")
    end_ns = max(int(busy.ends_ns.max(initial=0)) for busy in (steps.prefill, steps.decode))
    if not steps.places:
        _nothing(panel, "no steps")
        return
    prefills = set(steps.prefill.place.tolist())
    order = sorted(range(len(steps.places)), key=lambda place: (place not in prefills, *_natural(steps.places[place])))
    shown = [steps.places[place] for place in order[:MOST_INSTANCES]]
    edges = np.linspace(0, end_ns, TIME_BINS + 1).astype(np.int64)
    scale, _, label = _unit(end_ns)
    labelled: set[str] = set()
    for row, place in enumerate(order[:MOST_INSTANCES]):
        unions = {"prefill": steps.prefill.of(place), "decode": steps.decode.of(place)}
        phases = [name for name, (starts, _) in unions.items() if len(starts)]
        for name in phases:
            busy = overlap_ns(edges[:-1], edges[1:], unions[name]) / np.maximum(np.diff(edges), 1)
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
    hidden = f"; the first {len(shown)} of {len(order)} instances" if len(order) > len(shown) else ""
    panel.set_xlabel(f"run time, {label} (height: share of time busy{hidden})")
    panel.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1), fontsize=9)


def _gauges(panel: Any, totals: Mapping[str, Totals]) -> None:
    """Residency (left axis) and queues (right axis), summed over their sources."""
    panel.set_title("Pool and queues", loc="left", fontsize=10, fontweight="bold")
    metrics = sorted(totals)
    left = _matching(metrics, RESIDENCY_WORDS)[:2]
    right = [metric for metric in _matching(metrics, QUEUE_WORDS) if metric not in left][:2]
    if not left and not right:
        left = metrics[:2]
    if not left and not right:
        _nothing(panel, "no samples")
        return
    scale, _, label = _unit(max(int(times[-1]) for times, _ in totals.values()))
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
