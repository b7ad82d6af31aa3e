"""The sampled gauges of a run on a grid of bins: the table is read a piece at a time, and only bins are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    rows: dict[str, dict[str, NDArray[np.float64]]] = {name: {} for name in metrics}
    for name, source, times, values in _series(run, metrics):
        sums = rows[name].setdefault(source, np.zeros((2, bins)))
        index = np.searchsorted(edges, times, side="right") - 1
        index[times == edges[-1]] = bins - 1  # the last tick closes the last bin
        inside = (index >= 0) & (index < bins)
        sums[0] += np.bincount(index[inside], values[inside], bins)
        sums[1] += np.bincount(index[inside], minlength=bins)
    found: dict[str, tuple[list[str], PerSource]] = {}
    for name, by_source in rows.items():
        order = sorted(by_source, key=natural)
        sums = np.array([by_source[source] for source in order]).reshape(len(order), 2, bins)
        counts = sums[:, 1]
        found[name] = order, np.divide(sums[:, 0], counts, out=np.full(counts.shape, np.nan), where=counts > 0)
    return found


def counters(run: Run, metric: str, edges: Edges) -> Mapping[str, NDArray[np.float64]]:
    """By source: how much a counter grew in each bin (between samples it grows evenly), NaN after its last sample."""
    parts: dict[str, list[tuple[NDArray[np.int64], NDArray[np.float64]]]] = {}
    for _, source, times, values in _series(run, [metric]):
        parts.setdefault(source, []).append((times, values))
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


def _series(run: Run, metrics: Sequence[str]) -> Iterator[tuple[str, str, NDArray[np.int64], NDArray[np.float64]]]:
    """`(metric, source, times, values)`, a piece of the table at a time."""
    for piece in run.pieces("samples", "time_ns", "metric", "source", "value"):
        words: list[tuple[Any, list[str]]] = []
        for column in ("metric", "source"):
            encoded = piece.column(column).combine_chunks().dictionary_encode()
            words.append((encoded.indices.to_numpy(), encoded.dictionary.to_pylist()))
        (metric_codes, names), (source_codes, sources) = words
        times, values = integers(piece, "time_ns"), floats(piece, "value")
        for code, name in enumerate(names):
            if name not in metrics:
                continue
            rows = np.flatnonzero(metric_codes == code)
            for source in np.unique(source_codes[rows]).tolist():
                of_source = rows[source_codes[rows] == source]
                yield name, sources[source], times[of_source], values[of_source]
