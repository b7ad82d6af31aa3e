"""What the tables of a run look like, and how they are written and read back."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import RunError
from mcjax.track.arrow import Table, arrow, compute, give_back, parquet

SCHEMA_VERSION = 3
VERSION_KEY = b"mcjax_schema"

QUANTITIES = ("queue_s", "transfer_s", "prefill_s")
"""Candidate quantities with a column of their own; all others go to `others`, as JSON."""

Schema = tuple[tuple[str, str], ...]

SCHEMAS: dict[str, Schema] = {
    "requests": (
        ("request_id", "int"),
        ("arrival_ns", "int"),
        ("tenant", "text"),
        ("session", "text"),
        ("turn", "int"),
        ("parent", "int?"),
        ("priority", "int"),
        ("prompt_tokens", "int"),
        ("max_tokens", "int"),
        ("state", "text"),
        ("reason", "text"),
        ("prefill_instance", "text"),
        ("decode_instance", "text"),
        ("attempts", "int"),
        ("local_tokens", "int"),
        ("remote_tokens", "int"),
        ("prefill_start_ns", "int"),
        ("first_token_ns", "int"),
        ("finish_ns", "int"),
        ("output_tokens", "int"),
        ("finish_reason", "text"),
        ("ttft_ns", "int?"),
        ("tbt_mean_ns", "int?"),
        ("tbt_p99_ns", "int?"),
        ("tbt_max_ns", "int?"),
        ("tbt_tail_ns", "int?"),
        ("slo_ttft_s", "float"),
        ("slo_tbt_s", "float"),
        ("met_slo", "bool"),
        ("blocks", "int[]"),
        ("output", "int32[]"),
        ("intervals_ns", "int[]"),
    ),
    "events": (
        ("time_ns", "int"),
        ("start_ns", "int"),
        ("kind", "text"),
        ("request_id", "int"),
        ("place", "text"),
        ("tier", "text"),
        ("first_block", "text"),
        ("blocks", "int"),
        ("tokens", "int"),
        ("bytes", "int"),
        ("detail", "text"),
    ),
    "decisions": (
        ("time_ns", "int"),
        ("request_id", "int"),
        ("stage", "text"),
        ("strategy", "text"),
        ("choice", "text"),
        ("source", "text"),
        ("reused_tokens", "int"),
        ("expected_s", "float"),
        ("names", "text[]"),
        *((quantity, "float[]") for quantity in QUANTITIES),
        ("others", "text"),
        ("reason", "text"),
        ("outcome_s", "float"),
        ("outcome", "text"),
    ),
    "reports": (
        ("time_ns", "int"),
        ("tick_ns", "int"),
        ("source", "text"),
        ("kind", "text"),
        ("values", "int[]"),
    ),
    "samples": (
        ("time_ns", "int"),
        ("source", "text"),
        ("metric", "text"),
        ("value", "float"),
    ),
    "outcomes": (
        ("time_ns", "int"),
        ("mechanism", "text"),
        ("call", "int"),
        ("payload", "text"),
    ),
}

DIGESTED = ("requests", "events", "decisions", "reports", "samples")
"""Always written. `outcomes` exists only where a real mechanism answered, and belongs to no digest."""

_DELTA_CODED = {"requests": ["intervals_ns.list.element"], "events": ["time_ns", "start_ns"], "samples": ["time_ns"]}


def type_of(kind: str) -> Any:
    """The Arrow type behind a kind that `SCHEMAS` names."""
    pa = arrow()
    if kind.endswith("[]"):
        return pa.list_(type_of(kind[:-2]))
    types = {"int": pa.int64, "int?": pa.int64, "int32": pa.int32, "bool": pa.bool_, "float": pa.float64}
    return types.get(kind, pa.string)()


def piece_rows(name: str) -> int:
    """Rows of a table that are made, or read, at a time: those with lists may be thousands of bytes each."""
    return 512 if any(kind.endswith("[]") for _, kind in SCHEMAS[name]) else 4096


def schema_of(name: str) -> Any:
    """The `pyarrow.Schema` of a table, with what its file says of itself."""
    metadata = {VERSION_KEY: str(SCHEMA_VERSION).encode(), b"mcjax_table": name.encode()}
    return arrow().schema([(column, type_of(kind)) for column, kind in SCHEMAS[name]], metadata=metadata)


def writer(name: str, path: Path) -> Any:
    """A `pyarrow.parquet.ParquetWriter` for a table: zstd-compressed, schema version in its metadata."""
    # Times grow slowly: coded as differences they take a third of the space that a dictionary would.
    delta = _DELTA_CODED.get(name, [])
    return parquet().ParquetWriter(
        path,
        schema_of(name),
        compression="zstd",
        use_dictionary=[path for path in _leaves(name) if path not in delta],
        column_encoding=dict.fromkeys(delta, "DELTA_BINARY_PACKED"),
    )


def write(tables: Mapping[str, Table], directory: Path) -> None:
    """One `NAME.parquet` a table; empty `outcomes` are left out."""
    for name, table in tables.items():
        if name == "outcomes" and table.num_rows == 0:
            continue
        with writer(name, directory / f"{name}.parquet") as file:
            file.write_table(table.cast(schema_of(name)))


def _leaves(name: str) -> list[str]:
    return [column + (".list.element" if kind.endswith("[]") else "") for column, kind in SCHEMAS[name]]


def check(name: str, directory: Path) -> None:
    """Raise `RunError` unless the table is there, is whole, and has this version's columns."""
    path = directory / f"{name}.parquet"
    try:
        schema = parquet().read_schema(path)
    except (OSError, arrow().ArrowException) as error:
        raise RunError(f"{directory}: {path.name} is missing or damaged ({_one_line(error)})") from error
    metadata: dict[bytes, bytes] = schema.metadata or {}
    version = metadata.get(VERSION_KEY, b"none").decode(errors="replace")
    if version != str(SCHEMA_VERSION):
        raise RunError(
            f"{directory}: {path.name} has schema version {version}, this mcjax reads version {SCHEMA_VERSION}; "
            "read it with the mcjax that environment.json names"
        )
    missing = sorted({column for column, _ in SCHEMAS[name]}.difference(schema.names))
    if missing:
        raise RunError(f"{directory}: {path.name} lacks the columns {', '.join(missing)}")


def read(name: str, directory: Path) -> Table:
    """The table as written. Raises `RunError` where it is missing, damaged or of another version."""
    check(name, directory)
    with _reading(name, directory) as path:
        return parquet().read_table(path)


@contextlib.contextmanager
def _reading(name: str, directory: Path) -> Generator[Path]:
    try:
        yield directory / f"{name}.parquet"
    except (OSError, arrow().ArrowException) as error:
        raise RunError(f"{directory}: {name}.parquet is damaged ({_one_line(error)})") from error


def empty(name: str) -> Table:
    """The table without rows."""
    return schema_of(name).remove_metadata().empty_table()


class StoredTables(Mapping[str, Table]):
    """The tables in a run directory, each read when it is asked for, as often as it is asked for.

    `digest` is that of all of them, if it is known.
    """

    def __init__(self, directory: Path, digest: str | None = None):
        self._directory = directory
        self.digest = digest

    def __getitem__(self, name: str) -> Table:
        return empty(name) if self._absent(name) else read(name, self._directory)

    def __iter__(self) -> Iterator[str]:
        return iter(SCHEMAS)

    def __len__(self) -> int:
        return len(SCHEMAS)

    def columns(self, name: str, columns: Sequence[str]) -> Table:
        if self._absent(name):
            return empty(name).select(columns)
        with _reading(name, self._directory) as path:
            return parquet().ParquetFile(path).read(columns=list(columns), use_threads=False)

    def pieces(self, name: str, columns: Sequence[str]) -> Iterator[Table]:
        if self._absent(name):
            return
        with _reading(name, self._directory) as path, parquet().ParquetFile(path, pre_buffer=False) as file:
            for batch in file.iter_batches(piece_rows(name), columns=list(columns), use_threads=False):
                yield arrow().Table.from_batches([batch])
        give_back()

    def _absent(self, name: str) -> bool:
        return name == "outcomes" and not (self._directory / "outcomes.parquet").exists()


def columns(tables: Mapping[str, Table], name: str, columns: Sequence[str]) -> Table:
    """Some columns of a table; of stored tables nothing else is read."""
    if isinstance(tables, StoredTables):
        return tables.columns(name, columns)
    return tables[name].select(columns)


def pieces(tables: Mapping[str, Table], name: str, columns: Sequence[str]) -> Iterator[Table]:
    """Some columns of a table, its rows a piece at a time: a large table need not be in memory as a whole."""
    if isinstance(tables, StoredTables):
        yield from tables.pieces(name, columns)
    else:
        yield tables[name].select(columns)


def integers(table: Table, column: str) -> NDArray[np.int64]:
    """`[rows]` int64; the column has no nulls."""
    return table.column(column).to_numpy().astype(np.int64, copy=False)


def floats(table: Table, column: str) -> NDArray[np.float64]:
    """`[rows]` float64."""
    return table.column(column).to_numpy()


def chosen(table: Table, column: str, words: Iterable[str]) -> NDArray[np.bool_]:
    """`[rows]`: where a text column holds one of `words`."""
    wanted = arrow().array(list(words), arrow().string())
    return compute().is_in(table.column(column), value_set=wanted).to_numpy().astype(np.bool_, copy=False)


def _one_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
