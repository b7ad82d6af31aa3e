"""`queues`: who waits, and how large batches are."""

from __future__ import annotations

from mcjax.track.plots.drawn import Drawn
from mcjax.track.plots.gauges import binned, by_role, period_ns
from mcjax.track.plots.kind import Kind
from mcjax.track.plots.over_time import Edges, PerSource, Quantities, over_time
from mcjax.track.plots.panels import MOST_LINES
from mcjax.track.plots.subject import Subject
from mcjax.track.run import Run

GAUGES = {"queue_prompts": "prompts queued", "batch": "sequences decoding"}
IDLE = {("queue_prompts", "decode"), ("batch", "prefill")}
"""What an instance of a role never has."""


def draw(subject: Subject) -> Drawn:
    return over_time(subject, _read, period_ns(subject.first(MOST_LINES), KIND.name))


def _read(run: Run, edges: Edges) -> Quantities:
    found: dict[str, PerSource] = {}
    for name, (sources, values) in binned(run, list(GAUGES), edges).items():
        if sources:
            title = GAUGES[name]
            found |= {
                f"{panel} instance": rows
                for panel, rows in by_role(f"{title} a", sources, values).items()
                if (name, panel.rpartition(", ")[2]) not in IDLE
            }
    return {title.replace(" a, ", " a "): rows for title, rows in found.items()}


KIND = Kind(
    "queues",
    "Queues and batches",
    "Prompts that an instance has accepted and not finished, and sequences in its decode batch, over time: mean over "
    "the instances of a role. A queue that keeps growing means more traffic than prefill can take.",
    draw,
    ("from_s", "to_s"),
)
