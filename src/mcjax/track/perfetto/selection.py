"""What of a run goes into a trace: some of its requests, a stretch of its time, or all; read a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mcjax.engine.cluster_spec import node_of
from mcjax.errors import ConfigError, RunError
from mcjax.track.arrow import Table, arrow
from mcjax.track.schemas import SCHEMAS
from mcjax.track.tables import chosen, integers
from mcjax.types import NS_PER_S

if TYPE_CHECKING:
    from mcjax.track.run import Run

ROWS = 4096
"""Rows that are held at a time as Python objects."""
FOREVER_NS = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Selection:
    """Rows of a run between two times: those of some `requests` (None: of all), and those of nobody, such as decode
    steps and gauges, but not of instances that those requests have nothing to do with.
    """

    run: Run
    requests: NDArray[np.int64] | None
    from_ns: int
    to_ns: int
    roles: Mapping[str, str]
    """Of the instances, in the order in which they joined."""
    elsewhere: frozenset[str]
    """Instances and nodes that are left out."""

    def rows(
        self, table: str, begin: str, end: str, place: str = "", without: Sequence[str] = ()
    ) -> Iterator[tuple[Any, ...]]:
        """The cells of each row that is selected, in the order of the table's columns less `without`.

        `begin` and `end` name the columns of its times, `place` that of where it was; a negative begin counts as the
        end, a negative end as never.
        """
        columns = [column for column, _ in SCHEMAS[table] if column not in without]
        for piece in self.run.pieces(table, *columns):
            for start in range(0, piece.num_rows, ROWS):
                some = piece.slice(start, ROWS)
                kept = some.filter(arrow().array(self._mask(some, begin, end, place)))
                yield from zip(*(kept.column(column).to_pylist() for column in columns), strict=True)

    def _mask(self, piece: Table, begin: str, end: str, place: str) -> NDArray[np.bool_]:
        ends_ns, begins_ns = integers(piece, end), integers(piece, begin)
        begins_ns = np.where(begins_ns < 0, ends_ns, begins_ns)
        mask = ((ends_ns < 0) | (ends_ns >= self.from_ns)) & (begins_ns <= self.to_ns)
        if self.requests is None:
            return mask
        shared = ~chosen(piece, place, self.elsewhere) if place else np.False_
        if "request_id" not in piece.column_names:
            return mask & shared
        ids = integers(piece, "request_id")
        return mask & ((ids < 0) & shared | np.isin(ids, self.requests))


def select(run: Run, requests: Sequence[int], from_s: float | None, to_s: float | None) -> Selection:
    """With requests, and unless told otherwise, from the first that is known of them to the last.

    Raises `RunError` for a request that the run does not know, `ConfigError` for times in which nothing lies.
    """
    wanted = np.unique(np.array(requests, np.int64)) if requests else None
    seen = _look_through(run, wanted)
    from_ns, to_ns = (0, FOREVER_NS) if wanted is None else (min(seen.times_ns), max(seen.times_ns))
    from_ns = from_ns if from_s is None else round(from_s * NS_PER_S)
    to_ns = to_ns if to_s is None else round(to_s * NS_PER_S)
    if from_ns > to_ns:
        raise ConfigError("--to", to_s, f"lies before {from_ns / NS_PER_S:g}, where the trace begins")
    roles, places = seen.roles, seen.places
    here = {name for name in roles if wanted is None or name in places or node_of(name) in places}
    elsewhere = frozenset(place for name in roles if name not in here for place in (name, node_of(name)))
    return Selection(run, wanted, from_ns, to_ns, {name: roles[name] for name in roles if name in here}, elsewhere)


@dataclass(slots=True)
class _Seen:
    """What a look through a run has shown: the roles of its instances, and where and when its chosen requests were."""

    roles: dict[str, str] = field(default_factory=dict[str, str])
    places: set[str] = field(default_factory=set[str])
    times_ns: list[int] = field(default_factory=list[int])


def _look_through(run: Run, wanted: NDArray[np.int64] | None) -> _Seen:
    seen = _Seen()
    found: list[NDArray[np.int64]] = []
    for piece in run.pieces("events", "time_ns", "kind", "request_id", "place", "detail"):
        joined = piece.filter(arrow().array(chosen(piece, "kind", ["join"])))
        seen.roles.update(zip(joined.column("place").to_pylist(), joined.column("detail").to_pylist(), strict=True))
        theirs = piece.filter(arrow().array(np.isin(integers(piece, "request_id"), [] if wanted is None else wanted)))
        if theirs.num_rows:
            found.append(np.unique(integers(theirs, "request_id")))
            times_ns = integers(theirs, "time_ns")
            seen.times_ns += [int(times_ns.min()), int(times_ns.max())]
            seen.places.update(*(place.split(">") for place in theirs.column("place").unique().to_pylist()))
    if wanted is not None:
        table = run.columns("requests", "request_id", "arrival_ns", "finish_ns")
        ids = integers(table, "request_id")
        ended = np.isin(ids, wanted)
        for column in ("arrival_ns", "finish_ns"):
            seen.times_ns += integers(table, column)[ended].tolist()
        for missing in np.setdiff1d(wanted, np.concatenate([ids, *found])).tolist():
            raise RunError(f"{run.directory or 'this run'}: no request {missing}{_nearest(ids, missing)}")
        if not np.isin(wanted, ids).all():
            seen.times_ns.append(FOREVER_NS)  # it had not ended when the run did
    return seen


def _nearest(ids: NDArray[np.int64], request_id: int) -> str:
    """`; the nearest are 4, 6, 8`."""
    if not len(ids):
        return "; none has ended in it"
    order = np.argsort(np.abs(ids.astype(np.float64) - request_id), kind="stable")
    return f"; the nearest are {', '.join(map(str, np.sort(ids[order[:4]]).tolist()))}"
