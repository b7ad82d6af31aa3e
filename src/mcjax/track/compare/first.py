"""Where two tables part: the first row that differs, looked for a piece at a time, from the start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from mcjax.track.arrow import Table, arrow, compute
from mcjax.track.run import Run
from mcjax.track.schemas import SCHEMAS, piece_rows


@dataclass(frozen=True, slots=True)
class RowDifference:
    """The first row that differs, and in what. Column `(rows)`: one table ends there, and these are their lengths."""

    row: int
    column: str
    first: Any
    second: Any


def first_row(first: Run, second: Run, table: str, columns: Sequence[str] = ()) -> RowDifference | None:
    """Where a table of two runs parts, or None if it does not; only the pieces up to there are read. NaN equals NaN."""
    names = list(columns) or [name for name, _ in SCHEMAS[table]]
    row = 0
    for ours, theirs in _side_by_side(first.pieces(table, *names), second.pieces(table, *names), piece_rows(table)):
        length = min(len(ours), len(theirs))
        found = _in_piece(ours.slice(0, length), theirs.slice(0, length), names)
        if found is not None:
            return RowDifference(row + found.row, found.column, found.first, found.second)
        row += length
        if len(ours) != len(theirs):
            counts = [run.columns(table, names[0]).num_rows for run in (first, second)]
            return RowDifference(row, "(rows)", *counts)
    return None


def one_row(run: Run, table: str, row: int) -> dict[str, Any] | None:
    """A row by its number, or None if there are not so many."""
    start = 0
    for piece in run.pieces(table, *(name for name, _ in SCHEMAS[table])):
        if row < start + len(piece):
            return piece.slice(row - start, 1).to_pylist()[0]
        start += len(piece)
    return None


def _side_by_side(first: Iterator[Table], second: Iterator[Table], rows: int) -> Iterator[tuple[Table, Table]]:
    """Pieces of equal length, whatever those are that come in, but for the last."""
    ours, theirs = _cut(first, rows), _cut(second, rows)
    while True:
        one, other = next(ours, None), next(theirs, None)
        if one is None and other is None:
            return
        if one is None or other is None:
            there = one if one is not None else other
            assert there is not None
            none = there.slice(0, 0)
            yield (there, none) if one is not None else (none, there)
            return
        yield one, other
        if len(one) != len(other):
            return


def _cut(pieces: Iterator[Table], rows: int) -> Iterator[Table]:
    waiting: Table = None
    for piece in pieces:
        waiting = piece if waiting is None else arrow().concat_tables([waiting, piece])
        while len(waiting) >= rows:
            yield waiting.slice(0, rows)
            waiting = waiting.slice(rows)
    if waiting is not None and len(waiting):
        yield waiting


def _in_piece(ours: Table, theirs: Table, names: Sequence[str]) -> RowDifference | None:
    differing: list[tuple[int, str]] = []
    for name in names:
        one, other = ours.column(name), theirs.column(name)
        if not _same(one, other):
            pairs = zip(one.to_pylist(), other.to_pylist(), strict=True)
            at = next((index for index, (a, b) in enumerate(pairs) if not _equal(a, b)), None)
            if at is not None:
                differing.append((at, name))
    if not differing:
        return None
    at = min(row for row, _ in differing)
    name = next(name for row, name in differing if row == at)
    return RowDifference(at, name, ours.column(name)[at].as_py(), theirs.column(name)[at].as_py())


def _same(one: Any, other: Any) -> bool:
    """A quick look at whole columns; False where only their values can tell."""
    types = arrow().types
    if one.equals(other):
        return True
    if types.is_list(one.type):
        lengths = [compute().list_value_length(side) for side in (one, other)]
        if not lengths[0].equals(lengths[1]):
            return False
        one, other = compute().list_flatten(one), compute().list_flatten(other)
    if not types.is_floating(one.type) or one.null_count or other.null_count:
        return False
    return bool(np.array_equal(one.to_numpy(), other.to_numpy(), equal_nan=True))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        lists = cast("list[Any]", one), cast("list[Any]", other)
        return len(lists[0]) == len(lists[1]) and all(_equal(a, b) for a, b in zip(*lists, strict=True))
    return bool(one == other or (one != one and other != other))
