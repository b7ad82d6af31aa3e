"""`tbt_cdf`: how long between two tokens."""

from __future__ import annotations

from mcjax.track.plots.cdf import cdf
from mcjax.track.plots.drawn import Drawn
from mcjax.track.plots.kind import Kind
from mcjax.track.plots.subject import Subject


def draw(subject: Subject) -> Drawn:
    return cdf(subject, KIND.name, "intervals_ns", "time between tokens", "intervals")


KIND = Kind(
    "tbt_cdf",
    "Time between tokens",
    "The share of all intervals between consecutive output tokens of completed requests that were at most so long; "
    "further left is better. An interval of a long answer weighs as much as one of a short answer.",
    draw,
)
