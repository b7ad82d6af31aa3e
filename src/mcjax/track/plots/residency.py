"""`residency`: how full each tier of the cache is."""

from __future__ import annotations

from typing import Any

from mcjax.track.plots.drawn import Drawn
from mcjax.track.plots.gauges import binned, by_role, period_ns
from mcjax.track.plots.kind import Kind
from mcjax.track.plots.over_time import Edges, Quantities, over_time
from mcjax.track.plots.panels import MOST_LINES, share_axis
from mcjax.track.plots.subject import Subject
from mcjax.track.run import Run

TIERS = {"page_fill": "HBM pages", "pool_fill": "DRAM pool"}


def draw(subject: Subject) -> Drawn:
    return over_time(subject, _read, period_ns(subject.first(MOST_LINES), KIND.name), _form)


def _read(run: Run, edges: Edges) -> Quantities:
    found: dict[str, Any] = {}
    for name, (sources, values) in binned(run, list(TIERS), edges).items():
        if sources:
            found |= by_role(TIERS[name], sources, values)
    return found


def _form(title: str, panel: Any) -> None:
    share_axis(panel.yaxis)
    panel.set_ylim(0, max(0.1, min(1.02, panel.dataLim.y1 * 1.1)))


KIND = Kind(
    "residency",
    "How full the cache is",
    "The filled share of each tier over time, by the role of its node: pages in HBM, where requests compute, and the "
    "DRAM pool, where prefixes stay. Mean over instances; a tier that stays full evicts.",
    draw,
    ("from_s", "to_s"),
)
