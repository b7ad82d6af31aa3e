"""One request's story, read from a run's tables: what happened to it, what was decided for it, and among what."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mcjax.errors import RunError
from mcjax.track.arrow import Table, compute
from mcjax.track.levels import FULL
from mcjax.track.tables import integers
from mcjax.types import NS_PER_S

if TYPE_CHECKING:
    from mcjax.track.run import Run

NEAREST = 4
DECODING = "(decoding)"


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """A thing that happened to the request. Times are seconds since its arrival; `took_s` is None for an instant."""

    begin_s: float
    took_s: float | None
    kind: str
    place: str
    tier: str = ""
    first_block: str = ""
    """Key of the first block of the span, in hexadecimal; empty where there is none."""
    blocks: int = 0
    tokens: int = 0
    nbytes: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one choice would have cost by the conductor's estimate, seconds; None where that was not estimated.

    `total_s` is what the estimates promise for it. Where the decision pulls a prefix, the total of a candidate that
    was not chosen is that of computing from its own prefix, and its `transfer_s` (what a pull to it would take) is no
    part of that: whether the strategy would have pulled there is not known.
    """

    name: str
    chosen: bool
    queue_s: float | None = None
    transfer_s: float | None = None
    compute_s: float | None = None
    total_s: float | None = None
    others: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class RequestDecision:
    """What was chosen for the request, what was expected of it, and what came of it.

    `begin_s` is seconds since arrival. `expected_s` and `outcome_s` are of what the stage is about: seconds to the
    first token (`prefill`), between tokens (`decode`), of moving or computing (`fetch`, `transfer`), or of the promise
    that would have been broken (`admission.*`); None where unknown.
    """

    begin_s: float
    stage: str
    strategy: str
    choice: str
    source: str
    reused_tokens: int
    expected_s: float | None
    outcome_s: float | None
    outcome: str
    reason: str
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestStory:
    """Everything that a run's tables say of one request; `print` it, show it with rich, or `plot` it.

    `row` is its line of `requests.parquet`, or None if it had not ended when the run did.
    """

    request_id: int
    arrival_ns: int
    row: Mapping[str, Any] | None
    events: tuple[RequestEvent, ...]
    decisions: tuple[RequestDecision, ...]

    def plot(self) -> Any:
        """A `matplotlib.figure.Figure`: where the request was when, a row a place; `figure.savefig(path)` keeps it."""
        from mcjax.track.plots.timeline import timeline

        return timeline(self)

    def timeline(self) -> list[RequestEvent]:
        """The events in order, and one line for decoding: its steps are a whole batch's and name no request."""
        first_s, end_s, row = self.since_arrival_s("first_token_ns"), self.since_arrival_s("finish_ns"), self.row
        if row is None or first_s is None or end_s is None or not row["decode_instance"] or row["output_tokens"] < 2:
            return list(self.events)
        detail = "first token to last; steps are shared with the batch"
        place, tokens = row["decode_instance"], row["output_tokens"] - 1
        decoding = RequestEvent(first_s, end_s - first_s, DECODING, place, tokens=tokens, detail=detail)
        return sorted([*self.events, decoding], key=lambda event: event.begin_s)

    def since_arrival_s(self, column: str) -> float | None:
        """Seconds from arrival to a time of the row (such as `first_token_ns`), or None if that never came."""
        time_ns = -1 if self.row is None else self.row[column]
        return None if time_ns < 0 else (time_ns - self.arrival_ns) / NS_PER_S

    def __repr__(self) -> str:
        state = "unfinished" if self.row is None else self.row["state"]
        return f"RequestStory({self.request_id}, {state}, {len(self.events)} events, {len(self.decisions)} decisions)"

    def __str__(self) -> str:
        from mcjax.track.explain import plain

        return plain(self)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from mcjax.track.explain import rich_parts

        return rich_parts(self, options.max_width)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def story_of(run: Run, request_id: int) -> RequestStory:
    """What the run says of a request.

    Raises `RunError` for an unknown request (names the nearest), and for a run of a lower `track.level` than full.
    """
    where = run.directory or "this run"
    run.require(FULL, "it holds neither the events of requests nor the candidates of decisions")
    rows, events, decisions = (_of(table, request_id) for table in (run.requests, run.events, run.decisions))
    if not rows.num_rows and not events.num_rows:
        raise RunError(f"{where}: no request {request_id}{_nearest(run, request_id)}")
    row = rows.to_pylist()[0] if rows.num_rows else None
    arrival_ns = row["arrival_ns"] if row else min(integers(events, "time_ns"))
    happened = [_event(entry, arrival_ns) for entry in events.to_pylist()]
    happened.sort(key=lambda event: event.begin_s)  # stable: what began together stays in the order of the log
    decided = tuple(decision_of(entry, arrival_ns) for entry in decisions.to_pylist())
    return RequestStory(request_id, int(arrival_ns), row, tuple(happened), decided)


def _of(table: Table, request_id: int) -> Table:
    return table.filter(compute().equal(table.column("request_id"), request_id))


def _nearest(run: Run, request_id: int) -> str:
    """`; the nearest are 4, 6, 8`."""
    ids = np.unique(np.concatenate([integers(run.requests, "request_id"), integers(run.events, "request_id")]))
    ids = ids[ids >= 0]
    if not len(ids):
        return "; the run has none at all"
    order = np.argsort(np.abs(ids.astype(np.float64) - request_id), kind="stable")
    nearest = np.sort(ids[order[:NEAREST]])
    return f"; the nearest are {', '.join(map(str, nearest.tolist()))}"


def _event(entry: Mapping[str, Any], arrival_ns: int) -> RequestEvent:
    start_ns, end_ns = entry["start_ns"], entry["time_ns"]
    instant = start_ns < 0
    return RequestEvent(
        ((end_ns if instant else start_ns) - arrival_ns) / NS_PER_S,
        None if instant else (end_ns - start_ns) / NS_PER_S,
        entry["kind"],
        entry["place"],
        entry["tier"],
        entry["first_block"],
        entry["blocks"],
        entry["tokens"],
        entry["bytes"],
        entry["detail"],
    )


def decision_of(entry: Mapping[str, Any], arrival_ns: int) -> RequestDecision:
    """A row of `decisions`, as it is told. Times are since `arrival_ns`."""
    return RequestDecision(
        (entry["time_ns"] - arrival_ns) / NS_PER_S,
        entry["stage"],
        entry["strategy"],
        entry["choice"],
        entry["source"],
        entry["reused_tokens"],
        _known(entry["expected_s"]),
        _known(entry["outcome_s"]),
        entry["outcome"],
        entry["reason"],
        tuple(_candidates(entry)),
    )


def _candidates(entry: Mapping[str, Any]) -> list[Candidate]:
    names: Sequence[str] = entry["names"]
    others: dict[str, list[float]] = json.loads(entry["others"]) if entry["others"] else {}
    expected_s = _known(entry["expected_s"])
    made: list[Candidate] = []
    for index, name in enumerate(names):
        chosen = name == entry["choice"]
        queue_s, transfer_s, compute_s = (
            _at(entry[column], index) for column in ("queue_s", "transfer_s", "prefill_s")
        )
        parts = [queue_s, compute_s] if entry["source"] else [queue_s, transfer_s, compute_s]
        total_s = _sum(parts)
        fetched = entry["source"] or "load_s" in others
        if fetched and chosen and expected_s is not None and math.isfinite(expected_s):
            # The logged compute time is from the prefix in its host memory; it will compute from a longer one.
            load_s = 0.0 if entry["source"] else others["load_s"][index]
            total_s, compute_s = expected_s, expected_s - (queue_s or 0.0) - (transfer_s or 0.0) - load_s
        more = {quantity: values[index] for quantity, values in others.items()}
        made.append(Candidate(name, chosen, queue_s, transfer_s, compute_s, total_s, more))
    if entry["stage"] == "fetch" and entry["choice"] not in names:
        made.append(Candidate(entry["choice"], True, compute_s=expected_s, total_s=expected_s))
    return made


def _at(values: Sequence[float] | None, index: int) -> float | None:
    return None if values is None else _known(values[index])


def _sum(parts: Sequence[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return math.fsum(known) if known else None


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
