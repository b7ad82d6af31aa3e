"""The sampled gauges of a run on a grid of bins: the table is read a piece at a time, and only bins are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.track.arrow import arrow
from mcjax.track.levels import REQUESTS
from mcjax.track.plots.over_time import Edges, PerSource
from mcjax.track.plots.panels import natural
from mcjax.track.plots.subject import Subject, without_rows
from mcjax.track.run import Run
from mcjax.track.tables import floats, integers

ROLES = {"p": "prefill", "d": "decode", "m": "mixed"}


def binned(run: Run, metrics: Sequence[str], edges: Edges) -> Mapping[str, tuple[list[str], PerSource]]:
    """By metric: the sources, in order of their numbers, and the mean of each in each bin."""
    bins = len(edges) - 1
    places: dict[str, dict[str, int]] = {name: {} for name in metrics}
    sums: dict[str, NDArray[np.float64]] = {name: np.zeros((2, 0)) for name in metrics}
    for name, words, codes, times, values in _gauges(run, metrics):
        known = places[name]
        rows = np.array([known.setdefault(word, len(known)) for word in words], np.int64)[codes]
        index = np.searchsorted(edges, times, side="right") - 1
        index[times == edges[-1]] = bins - 1  # the last tick closes the last bin
        inside = (index >= 0) & (index < bins)
        cells, size = (rows * bins + index)[inside], len(known) * bins
        grown: NDArray[np.float64] = np.zeros((2, size))
        grown[:, : sums[name].shape[1]] = sums[name]
        grown[0] += np.bincount(cells, values[inside], size)
        grown[1] += np.bincount(cells, minlength=size)
        sums[name] = grown
    found: dict[str, tuple[list[str], PerSource]] = {}
    for name, known in places.items():
        order = sorted(known, key=natural)
        of_source = sums[name].reshape(2, len(known), bins)
        totals, counts = (each[[known[source] for source in order]] for each in of_source)
        means: PerSource = np.full(counts.shape, np.nan)
        found[name] = order, np.divide(totals, counts, out=means, where=counts > 0)
    return found


def counters(run: Run, metric: str, edges: Edges) -> Mapping[str, NDArray[np.float64]]:
    """By source: how much a counter grew in each bin (between samples it grows evenly), NaN after its last sample."""
    parts: dict[str, list[tuple[NDArray[np.int64], NDArray[np.float64]]]] = {}
    for _, words, codes, times, values in _gauges(run, [metric]):
        for code, source in enumerate(words):
            rows = codes == code
            parts.setdefault(source, []).append((times[rows], values[rows]))
    grown: dict[str, NDArray[np.float64]] = {}
    for source in sorted(parts, key=natural):
        times, values = (np.concatenate(each) for each in zip(*parts[source], strict=True))
        totals = np.interp(edges, np.concatenate([[0], times]), np.concatenate([[0.0], values]))
        grown[source] = np.where(edges[:-1] < times[-1], np.diff(totals), np.nan)
    return grown


def period_ns(subject: Subject, kind: str) -> int:
    """The longest time between two samples of any run. Raises `RunError` for a run that kept none."""
    longest = 1
    for group in subject.groups:
        for run in group.runs.values():
            ticks = np.zeros(0, np.int64)
            for piece in run.pieces("samples", "time_ns"):
                ticks = np.unique(np.concatenate([ticks, integers(piece, "time_ns")]))
                if len(ticks) > 1:
                    break
            if len(ticks) == 0:
                without_rows(run, kind, "samples", REQUESTS)
            if len(ticks) > 1:
                longest = max(longest, int(ticks[1] - ticks[0]))
    return longest


def by_role(title: str, sources: Sequence[str], values: PerSource) -> dict[str, PerSource]:
    """The rows of prefill, decode and mixed instances apart, under `title, prefill`."""
    stems = [ROLES.get(natural(source)[0].removeprefix("node-"), natural(source)[0]) for source in sources]
    names = sorted(set(stems), key=lambda stem: ([*ROLES.values(), stem].index(stem), stem))
    return {f"{title}, {name}": values[[stem == name for stem in stems]] for name in names}


_Gauges = tuple[str, list[str], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]


def _gauges(run: Run, metrics: Sequence[str]) -> Iterator[_Gauges]:
    """`(metric, sources, [N] which of them, [N] times, [N] values)`, a metric of a piece of the table at a time."""
    for piece in run.pieces("samples", "time_ns", "metric", "source", "value"):
        encoded: list[Any] = [
            piece.column(column).combine_chunks().dictionary_encode() for column in ("metric", "source")
        ]
        metric_codes, source_codes = (column.indices.to_numpy() for column in encoded)
        times, values = integers(piece, "time_ns"), floats(piece, "value")
        for code, name in enumerate(encoded[0].dictionary.to_pylist()):
            if name in metrics:
                rows = metric_codes == code
                present, codes = np.unique(source_codes[rows], return_inverse=True)
                words = encoded[1].dictionary.take(arrow().array(present)).to_pylist()
                yield name, words, codes, times[rows], values[rows]
