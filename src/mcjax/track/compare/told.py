"""Two runs' difference in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mcjax.track.compare.diff import ABSENT, Change, DecisionDifference, Difference, TokenDifference
from mcjax.track.explain import decision_lines
from mcjax.track.story import decision_of

LONGEST = 80
"""A longer value is cut in the middle."""


def told(difference: Difference) -> Iterator[tuple[str, list[str]]]:
    """Headings, and the lines below each."""
    yield f"{difference.names[0]} | {difference.names[1]}", []
    if difference.equal:
        yield "rows: equal in every row (the digests agree)", []
    yield _section("config", difference.config)
    yield _section("environment", difference.environment)
    yield _section("inputs", difference.inputs)
    for place, text in difference.strategies.items():
        yield f"strategy {place}", text.splitlines()
    if not difference.equal:
        yield _decision(difference)
        yield _tokens(difference.tokens)
        yield "first differing rows", _rows(difference)
    yield _section("figures", difference.figures)


def _section(title: str, changes: Sequence[Change]) -> tuple[str, list[str]]:
    lines = [f"{change.name}: {_cut(change.first)} | {_cut(change.second)}" for change in changes]
    return (title, lines) if lines else (f"{title}: no difference", [])


def _decision(difference: Difference) -> tuple[str, list[str]]:
    found = difference.decision
    if found is None:
        row = difference.rows.get("decisions")
        if row is None:
            return "first differing decision: none, all rows are equal", []
        if isinstance(row, str):
            return "first differing decision: unknown", [row]
        what = f"only what was estimated or came of it: row {row.row}, {row.column}: {row.first} | {row.second}"
        return "first differing decision: none", [what]
    lines = [f"row {found.row}"]
    for name, entry in zip(difference.names, (found.first, found.second), strict=True):
        lines += ["", f"{name}:", *(f"  {line}" for line in _entry(entry))]
    return f"first differing decision: {_which(found)}", lines


def _which(found: DecisionDifference) -> str:
    first, second = found.first, found.second
    entry = first or second or {}
    where = f"request {entry['request_id']}, {entry['stage']}, at {entry['time_ns'] / 1e9:.6f} s"
    if first is None or second is None:
        return f"{where}, where the other run has no more"
    same = all(first[key] == second[key] for key in ("request_id", "stage"))
    return where if same else f"{where}, where the other run decides something else"


def _entry(entry: Mapping[str, Any] | None) -> list[str]:
    if entry is None:
        return ["no more decisions"]
    request = f"request {entry['request_id']}, at {entry['time_ns'] / 1e9:.6f} s of the run"
    return [request, *decision_lines(decision_of(entry, 0))]


def _tokens(found: TokenDifference | str | None) -> tuple[str, list[str]]:
    if found is None:
        return "first differing token: none, outputs of the same requests are equal", []
    if isinstance(found, str):
        return f"first differing token: {found}", []
    tokens = ("(ended)" if token is None else str(token) for token in (found.first, found.second))
    return f"first differing token: request {found.request_id}, position {found.position}: {' | '.join(tokens)}", []


def _rows(difference: Difference) -> list[str]:
    lines: list[str] = []
    for table, found in difference.rows.items():
        if found is None:
            lines.append(f"{table}: equal in every row")
        elif isinstance(found, str):
            lines.append(f"{table}: {found}")
        elif found.column == "(rows)":
            lines.append(f"{table}: equal as far as row {found.row}; {found.first} | {found.second} rows")
        else:
            values = f"{_cut(str(found.first))} | {_cut(str(found.second))}"
            lines.append(f"{table}: row {found.row}, {found.column}: {values}")
    return lines


def _cut(text: str) -> str:
    text = text or ABSENT
    half = LONGEST // 2 - 2
    return text if len(text) <= LONGEST else f"{text[:half]} .. {text[-half:]}"
