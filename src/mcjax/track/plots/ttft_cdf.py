"""`ttft_cdf`: how long until the first token."""

from __future__ import annotations

from mcjax.track.plots.cdf import cdf
from mcjax.track.plots.drawn import Drawn
from mcjax.track.plots.kind import Kind
from mcjax.track.plots.subject import Subject


def draw(subject: Subject) -> Drawn:
    return cdf(subject, KIND.name, "ttft_ns", "time to first token", "completed requests")


KIND = Kind(
    "ttft_cdf",
    "Time to first token",
    "The share of completed requests whose first token came within so long; further left is better. Requests that were "
    "rejected, failed or cancelled have no latency: their share stands beside the name as lost.",
    draw,
)
