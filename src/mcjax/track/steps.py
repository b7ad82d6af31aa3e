"""When each instance computed: the step events of a run as disjoint intervals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mcjax.track.arrow import Table, arrow
from mcjax.track.statistics import merge
from mcjax.track.tables import chosen, integers

PREFILL_KINDS = ("prefill_step", "mixed_step")
DECODE_KINDS = ("decode_step", "mixed_step")
STEP_KINDS = ("prefill_step", "decode_step", "mixed_step")
"""Events that are intervals of computing, on which the busy times of the summary stand."""
COLUMNS = ("kind", "place", "start_ns", "time_ns")


@dataclass(frozen=True, slots=True)
class Busy:
    """Disjoint intervals of computing: interval `i` is of instance `place[i]`. In order of place, then of time."""

    place: NDArray[np.int64]
    starts_ns: NDArray[np.int64]
    ends_ns: NDArray[np.int64]

    def of(self, place: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        first, last = np.searchsorted(self.place, [place, place + 1])
        return self.starts_ns[first:last], self.ends_ns[first:last]


@dataclass(frozen=True, slots=True)
class Steps:
    """`places[i]` is the name of instance `i`. A mixed step is prefill and decode."""

    places: list[str]
    prefill: Busy
    decode: Busy


def steps_of(events: Iterable[Table]) -> Steps:
    """The steps in pieces of the event table that hold `COLUMNS`."""
    places: dict[str, int] = {}
    prefill, decode = list[Busy](), list[Busy]()
    for piece in events:
        steps = piece.filter(arrow().array(chosen(piece, "kind", STEP_KINDS)))
        words = steps.column("place").combine_chunks().dictionary_encode()
        codes = np.array([places.setdefault(word, len(places)) for word in words.dictionary.to_pylist()], np.int64)
        place = codes[words.indices.to_numpy()] if len(steps) else codes
        starts_ns, ends_ns = np.maximum(integers(steps, "start_ns"), 0), integers(steps, "time_ns")
        for kinds, found in ((PREFILL_KINDS, prefill), (DECODE_KINDS, decode)):
            mask = chosen(steps, "kind", kinds)
            found.append(_united(Busy(place[mask], starts_ns[mask], ends_ns[mask])))
    return Steps(list(places), _all(prefill), _all(decode))


def _all(parts: list[Busy]) -> Busy:
    none = np.empty(0, np.int64)
    columns = [[none, *column] for column in zip(*((b.place, b.starts_ns, b.ends_ns) for b in parts), strict=True)]
    return _united(Busy(*map(np.concatenate, columns))) if columns else Busy(none, none, none)


def _united(busy: Busy) -> Busy:
    """The union of each instance's intervals; each instance's times are moved far from all others for one merge."""
    stride = int(busy.ends_ns.max(initial=0)) + 1
    shift = busy.place * stride
    starts_ns, ends_ns = merge(busy.starts_ns + shift, busy.ends_ns + shift)
    place = starts_ns // stride
    return Busy(place, starts_ns - place * stride, ends_ns - place * stride)
