"""`goodput`: requests a second that kept their promise, and what became of all others."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mcjax.track.metrics import metric
from mcjax.track.plots.bands import scalar_band
from mcjax.track.plots.by_group import MOST_BARS, bar_rows, bars, composition, sweep_panels, swept
from mcjax.track.plots.drawn import Drawn
from mcjax.track.plots.kind import Kind
from mcjax.track.plots.panels import table
from mcjax.track.plots.style import BLUE, GREY, INK, ORANGE, SKY, Look
from mcjax.track.plots.subject import Subject
from mcjax.track.run import Run

GOODPUT = metric("goodput_rps")
FATES = {
    "within SLO": Look(BLUE, "-", "o", ""),
    "too late": Look(SKY, "-", "o", "///"),
    "rejected": Look(ORANGE, "-", "o", "xxx"),
    "failed": Look(INK, "-", "o", ""),
    "cancelled": Look(GREY, "-", "o", "..."),
}


def draw(subject: Subject) -> Drawn:
    line = swept(subject)
    if line is not None:
        panels = {"goodput": (_goodput, "requests/s"), "rejected, failed or cancelled": (_lost, "share")}
        return Drawn(*sweep_panels(subject, line, panels))
    shown = subject.first(MOST_BARS)
    bands = [scalar_band([_goodput(run) for run in group.runs.values()]) for group in shown.groups]
    parts = {
        fate: [scalar_band([fates(run).get(fate) for run in group.runs.values()])[0] for group in shown.groups]
        for fate in FATES
    }
    figure, left, right = bar_rows(shown, extra_in=0.35)
    bars(left, bands, lambda value: f"{value:.3g}")
    left.set_title("goodput, requests/s")
    composition(figure, right, parts, FATES)
    right.set_title("of all submitted")
    mean, low, high = np.array(bands, np.float64).T
    repetitions = [len(group.runs) for group in shown.groups]
    columns = {name.replace(" ", "_"): np.array(values) for name, values in parts.items()}
    data = table(group=list(shown.labels), goodput_rps=mean, low=low, high=high, repetitions=repetitions, **columns)
    return Drawn(figure, data)


def fates(run: Run) -> Mapping[str, float]:
    """Shares of the submitted requests by what became of them; nothing if there were none."""
    counts = {name: metric(f"requests.{name}").of(run.summary) or 0.0 for name in ("rejected", "failed", "cancelled")}
    submitted = metric("requests.submitted").of(run.summary) or 0.0
    if not submitted:
        return {}
    shares = {name: count / submitted for name, count in counts.items()}
    within = metric("slo_attainment").of(run.summary) or 0.0
    return {"within SLO": within, "too late": max(0.0, 1 - within - sum(shares.values())), **shares}


def _goodput(run: Run) -> float | None:
    return GOODPUT.of(run.summary)


def _lost(run: Run) -> float | None:
    found = fates(run)
    return found["rejected"] + found["failed"] + found["cancelled"] if found else None


KIND = Kind(
    "goodput",
    "Goodput",
    "Requests a second that completed within their SLO, and, of all requests submitted, what became of the others: "
    "a goodput is worth little without the share that was refused for it. Where a number was swept, it is the x axis.",
    draw,
    ("x",),
)
