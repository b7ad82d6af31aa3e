"""What became of each request, and what was decided for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcjax.track.perfetto.packets import Value
from mcjax.track.perfetto.selection import Selection
from mcjax.track.perfetto.tracks import Tracks
from mcjax.track.schemas import QUANTITIES, SCHEMAS
from mcjax.track.story import Candidate, decision_of

LISTS = ("blocks", "output", "intervals_ns")
PHASES = (("waiting", "prefill_start_ns"), ("prefill", "first_token_ns"), ("decode", "finish_ns"))
"""Parts of a request's life, and the column with the end of each."""


def write_requests(selection: Selection, tracks: Tracks) -> None:
    """A slice a request with its phases: those chosen on a track each, those of a whole run on one a tenant."""
    columns = [column for column, _ in SCHEMAS["requests"] if column not in LISTS]
    for cells in selection.rows("requests", "arrival_ns", "finish_ns", without=LISTS):
        row = dict(zip(columns, cells, strict=True))
        name = f"request {row['request_id']}"
        track = row["tenant"] if selection.requests is None else name
        begin_ns, end_ns = row["arrival_ns"], max(row["arrival_ns"], row["finish_ns"])
        told: dict[str, Value] = {key: value for key, value in row.items() if value not in (None, "")}
        tracks.span(("requests", track), name, begin_ns, end_ns, "request", told, within=_phases(row, begin_ns, end_ns))


def _phases(row: Mapping[str, Any], begin_ns: int, end_ns: int) -> list[tuple[str, int, int]]:
    """Name, begin and end of each that took time; one after the other, whatever the clocks of mechanisms said."""
    phases: list[tuple[str, int, int]] = []
    for name, column in PHASES:
        until_ns = end_ns if row[column] < 0 else min(max(begin_ns, row[column]), end_ns)
        if until_ns > begin_ns:
            phases.append((name, begin_ns, until_ns))
        begin_ns = until_ns
    return phases


def write_decisions(selection: Selection, tracks: Tracks) -> None:
    """An instant a decision, on a track a stage. Of a whole run with the estimates of the choice alone: those of all
    candidates would be most of the file."""
    columns = [column for column, _ in SCHEMAS["decisions"]]
    for cells in selection.rows("decisions", "time_ns", "time_ns"):
        row = dict(zip(columns, cells, strict=True))
        candidates = len(row["names"])
        if selection.requests is None:
            _narrow(row)
        decision = decision_of(row, 0)
        told: dict[str, Value] = {
            "request_id": row["request_id"],
            "stage": decision.stage,
            "strategy": decision.strategy,
            "choice": decision.choice,
            "candidates": candidates,
        }
        for key in ("source", "reused_tokens", "expected_s", "outcome_s", "outcome", "reason"):
            value = getattr(decision, key)
            if value not in (None, "", 0):
                told[key] = value
        estimates = {candidate.name: _estimates(candidate) for candidate in decision.candidates}
        if any(estimates.values()):
            told["estimates"] = estimates
        name = f"request {row['request_id']}: {decision.choice}"
        tracks.instant(("decisions", decision.stage), name, row["time_ns"], f"decision.{decision.stage}", told)


def _narrow(row: dict[str, Any]) -> None:
    """Leave only the choice among the candidates."""
    names: list[str] = row["names"]
    at = names.index(row["choice"]) if row["choice"] in names else len(names)
    for column in ("names", *QUANTITIES):
        if row[column] is not None:
            row[column] = row[column][at : at + 1]
    row["others"] = ""


def _estimates(candidate: Candidate) -> dict[str, Value]:
    """Seconds, as far as they were estimated; other quantities under their names."""
    known = {name: getattr(candidate, name) for name in ("queue_s", "transfer_s", "compute_s", "total_s")}
    return {name: value for name, value in {**known, **candidate.others}.items() if value is not None}
