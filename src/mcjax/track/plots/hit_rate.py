"""`hit_rate`: how much of the prompts was found in the cache, when, and where."""

from __future__ import annotations

from typing import Any

import numpy as np

from mcjax.track.levels import REQUESTS
from mcjax.track.metrics import metric
from mcjax.track.plots.by_group import sweep_panels, swept
from mcjax.track.plots.drawn import Drawn
from mcjax.track.plots.hit_curves import draw_hits
from mcjax.track.plots.kind import Kind
from mcjax.track.plots.over_time import BINS_AN_INCH, Edges, Quantities, over_time
from mcjax.track.plots.panels import share_axis
from mcjax.track.plots.subject import Subject, without_rows
from mcjax.track.run import Run
from mcjax.track.summary import HIT_COLUMNS, delivered
from mcjax.track.tables import integers

COLUMNS = ("arrival_ns", "prefill_start_ns", "prompt_tokens", *HIT_COLUMNS.values())
LEAST_BINS = 6
"""A bin holds at least so many of the bins that other kinds show: a share of a few prompts says little."""


def draw(subject: Subject) -> Drawn:
    first = next(iter(subject.groups[0].runs.values()))
    if len(subject.groups) == 1 and "hits" in first.summary:
        return draw_hits(first, subject.width_in)
    line = swept(subject)
    if line is not None:
        return Drawn(
            *sweep_panels(
                subject, line, {"prompt tokens found": (_found, "share"), "in other nodes": (_remote, "share")}
            )
        )
    from_ns, to_ns = subject.span_ns()
    bins = subject.width_in * BINS_AN_INCH / LEAST_BINS
    return over_time(subject, _read, round((to_ns - from_ns) / bins), _form)


def _read(run: Run, edges: Edges) -> Quantities:
    rows = run.columns("requests", *COLUMNS)
    if not rows.num_rows:
        without_rows(run, KIND.name, "the table of requests", REQUESTS)
        return {}
    arrival_ns, start_ns, prompt = (integers(rows, column) for column in COLUMNS[:3])
    started = start_ns >= 0

    def share(tokens: Any) -> Any:
        of = np.histogram(arrival_ns[started], edges, weights=prompt[started])[0]
        hit = np.histogram(arrival_ns[started], edges, weights=tokens[started])[0]
        return np.divide(hit, of, out=np.full(len(of), np.nan), where=of > 0)[None, :]

    return {"prompt tokens found": share(delivered(rows)), "in other nodes": share(integers(rows, "remote_tokens"))}


def _form(title: str, panel: Any) -> None:
    share_axis(panel.yaxis)
    panel.set_ylim(0, max(0.05, min(1.02, panel.dataLim.y1 * 1.1)))


def _found(run: Run) -> float | None:
    return metric("prefix_hit_rate.token").of(run.summary)


def _remote(run: Run) -> float | None:
    remote, *others = (
        metric(f"tokens_by_tier.{tier}").of(run.summary) or 0.0
        for tier in ("dram_remote", "hbm", "dram_local", "ssd", "computed")
    )
    return remote / total if (total := remote + sum(others)) else None


KIND = Kind(
    "hit_rate",
    "Prefix hits",
    "The share of prompt tokens that need not be computed, by the time of arrival, and of all prompt tokens those that "
    "came from another node's pool. Where a number was swept (the size of a pool, say), it is the x axis.",
    draw,
    ("x", "from_s", "to_s"),
)
