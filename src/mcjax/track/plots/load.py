"""`load`: what came in, and how much of it was in the system."""

from __future__ import annotations

import numpy as np

from mcjax.track.levels import REQUESTS
from mcjax.track.plots.drawn import Drawn
from mcjax.track.plots.kind import Kind
from mcjax.track.plots.over_time import Edges, Quantities, over_time, present, rate, running
from mcjax.track.plots.subject import Subject, without_rows
from mcjax.track.run import Run
from mcjax.track.tables import integers

COLUMNS = ("arrival_ns", "finish_ns", "prompt_tokens", "output_tokens")


def draw(subject: Subject) -> Drawn:
    return over_time(subject, _read)


def _read(run: Run, edges: Edges) -> Quantities:
    rows = run.columns("requests", *COLUMNS)
    if not rows.num_rows:
        without_rows(run, KIND.name, "the table of requests", REQUESTS)
        return {}
    arrival_ns, finish_ns, prompts, outputs = (integers(rows, column) for column in COLUMNS)
    finish_ns = np.maximum(finish_ns, arrival_ns)  # -1 where it never ended
    ones = np.ones(len(arrival_ns))
    found = {
        "requests arriving, 1/s": rate(arrival_ns, ones, edges),
        "prompt tokens arriving, 1/s": rate(arrival_ns, prompts, edges),
        "requests in the system": present(arrival_ns, finish_ns, ones, edges),
        "their tokens": present(arrival_ns, finish_ns, prompts + outputs, edges),
    }
    there = running(run, edges)
    return {title: np.where(there, values, np.nan)[None, :] for title, values in found.items()}


KIND = Kind(
    "load",
    "Load",
    "What arrives, and what is in the system (arrived and not ended), over time. Tokens are those of whole prompts and "
    "whole outputs. Groups that met the same traffic share the curves of what arrives.",
    draw,
    ("from_s", "to_s"),
)
