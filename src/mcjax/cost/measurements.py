"""Measured step times in a file: the schema, and a reader that says in which line and column a mistake is.

Columns, in any order, of a CSV file (lines that start with `#` are comments) or a Parquet file:

| column | unit | `prefill` | `decode` | `mixed` |
|---|---|---|---|---|
| `kind` | one of the three words | | | |
| `start_tokens` | tokens of the prompt that were in the cache | 0 or more | empty | 0 or more |
| `length_tokens` | prompt tokens computed | 1 or more | empty | 1 or more |
| `batch` | sequences that decode | empty | 1 or more | 1 or more |
| `context_tokens` | cached tokens of the whole decode batch before the step | empty | 0 or more | 0 or more |
| `seconds` | how long one step took | above 0 | above 0 | above 0 |

"Empty" may also be written 0. A point may be measured several times.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from mcjax.errors import ConfigError, TraceError

Kind = Literal["prefill", "decode", "mixed"]
KINDS: tuple[Kind, ...] = ("prefill", "decode", "mixed")
COUNTS = ("start_tokens", "length_tokens", "batch", "context_tokens")
COLUMNS = ("kind", *COUNTS, "seconds")
_LEAST = {
    "prefill": {"start_tokens": 0, "length_tokens": 1},
    "decode": {"batch": 1, "context_tokens": 0},
    "mixed": {"start_tokens": 0, "length_tokens": 1, "batch": 1, "context_tokens": 0},
}


@dataclass(frozen=True, slots=True)
class Measurement:
    """One step of one kind and how long it took; what the kind does not have is 0."""

    kind: Kind
    start_tokens: int
    length_tokens: int
    batch: int
    context_tokens: int
    seconds: float


def read(path: str) -> list[Measurement]:
    """Every row of a `.csv` or `.parquet` file, in order.

    Raises `ConfigError` when the file cannot be opened or lacks rows, and `TraceError` for a row (line of a CSV file,
    row of a Parquet file, from 1) or a column that is wrong.
    """
    file = Path(path)
    if file.suffix not in (".csv", ".parquet"):
        raise ConfigError("measurements", path, "must be a .csv or a .parquet file")
    try:
        lines = list(_csv_lines(file) if file.suffix == ".csv" else _parquet_lines(file))
    except FileNotFoundError:
        raise ConfigError("measurements", path, "no such file; docs/cost-models.md says what it must hold") from None
    except OSError as error:
        raise ConfigError("measurements", path, f"cannot be read ({error.strerror or error})") from None
    if not lines:
        problem = f"holds no rows; it needs a header, {','.join(COLUMNS)}, and a row for each measured step"
        raise ConfigError("measurements", path, problem)
    return [_measurement(path, line, row) for line, row in lines]


def write_csv(path: str, rows: Iterable[Measurement], comment: str) -> None:
    """A file that `read` reads, under `comment`, which says where the figures come from."""
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        file.writelines(f"# {line}\n" for line in comment.splitlines())
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([getattr(row, column) for column in COLUMNS] for row in rows)


def _csv_lines(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line number, row by column) of each line with something in it."""
    data = file.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"is not text in UTF-8 (byte {error.object[error.start]:#x})"
        raise TraceError(str(file), data.count(b"\n", 0, error.start) + 1, "line", problem) from None
    header: list[str] = []
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        for cells in reader:
            if not any(cells) or cells[0].startswith("#"):
                continue
            cells = [cell.strip() for cell in cells]
            if not header:
                header = cells
                _check_columns(str(file), reader.line_num, header)
            elif len(cells) != len(header):
                problem = f"the line has {len(cells)} values, the header {len(header)} columns"
                raise TraceError(str(file), reader.line_num, header[min(len(cells), len(header) - 1)], problem)
            else:
                yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise TraceError(str(file), reader.line_num, "line", f"is not CSV ({error})") from None


def _parquet_lines(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    parquet: Any = import_module("pyarrow.parquet")  # here, so that importing mcjax stays light
    try:
        table = parquet.read_table(file)
    except ValueError as error:  # ArrowInvalid is one
        raise ConfigError("measurements", file, f"is no Parquet file ({error})") from None
    _check_columns(str(file), 0, table.column_names)
    yield from enumerate(table.to_pylist(), 1)


def _check_columns(path: str, line: int, found: list[str]) -> None:
    for column in COLUMNS:
        if found.count(column) != 1:
            problem = "is missing" if column not in found else "appears twice"
            there = ",".join(found)
            problem = f"the column {problem} in the header {there[:80]!r}; the columns are {', '.join(COLUMNS)}"
            raise TraceError(path, line, column, problem)
    for column in found:
        if column not in COLUMNS:
            raise TraceError(path, line, column, f"is no column of this file; they are {', '.join(COLUMNS)}")


def _measurement(path: str, line: int, row: Mapping[str, Any]) -> Measurement:
    kind: Any = row["kind"]
    if kind not in KINDS:
        raise TraceError(path, line, "kind", f"{kind!r} is none of {', '.join(KINDS)}")
    counts: dict[str, int] = {}
    for column in COUNTS:
        least = _LEAST[kind].get(column)
        cell = row[column]
        value = _number(cell) if cell not in ("", None) else (None if least is not None else 0.0)
        if value is None or not value.is_integer() or value < (least or 0):
            raise TraceError(path, line, column, f"{cell!r} must be a whole number of at least {least or 0}")
        if least is None and value:
            raise TraceError(path, line, column, f"a {kind} row has none: leave it empty")
        counts[column] = int(value)
    seconds = _number(row["seconds"])
    if seconds is None or seconds <= 0:
        raise TraceError(path, line, "seconds", f"{row['seconds']!r} must be a number above 0")
    return Measurement(kind, **counts, seconds=seconds)


def _number(cell: Any) -> float | None:
    """The finite number that a cell holds, or None."""
    if isinstance(cell, bool):
        return None
    try:
        value = float(cell)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None
