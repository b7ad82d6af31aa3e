"""How the tables of a run are written and read back."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import RunError
from mcjax.track.arrow import Table, arrow, compute, give_back, parquet
from mcjax.track.migrations import check_version, columns_at, migrated
from mcjax.track.schemas import SCHEMA_VERSION, SCHEMAS, VERSION_KEY, piece_rows, schema_of

_DELTA_CODED = {"requests": ["intervals_ns.list.element"], "events": ["time_ns", "start_ns"], "samples": ["time_ns"]}


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


def check(name: str, directory: Path) -> int:
    """The version of a table. Raises `RunError` unless it is there, is whole, and has its version's columns."""
    path = directory / f"{name}.parquet"
    try:
        schema = parquet().read_schema(path)
    except (OSError, arrow().ArrowException) as error:
        raise RunError(f"{directory}: {path.name} is missing or damaged ({_one_line(error)})") from error
    metadata: dict[bytes, bytes] = schema.metadata or {}
    found = metadata.get(VERSION_KEY, b"none").decode(errors="replace")
    version = check_version(found, f"{directory}: {path.name}")
    missing = sorted(set(columns_at(version, name)).difference(schema.names))
    if missing:
        raise RunError(f"{directory}: {path.name} lacks the columns {', '.join(missing)}")
    return version


def read(name: str, directory: Path) -> Table:
    """The table as today's, whatever it was written as. Raises `RunError` where it is missing or damaged."""
    version = check(name, directory)
    with _reading(name, directory) as path:
        return migrated(version, name, parquet().read_table(path))


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
        version = check(name, self._directory)
        with _reading(name, self._directory) as path:
            table = parquet().ParquetFile(path).read(columns=_needed(version, columns), use_threads=False)
        return migrated(version, name, table).select(columns)

    def pieces(self, name: str, columns: Sequence[str]) -> Iterator[Table]:
        if self._absent(name):
            return
        version = check(name, self._directory)
        with _reading(name, self._directory) as path, parquet().ParquetFile(path, pre_buffer=False) as file:
            for batch in file.iter_batches(piece_rows(name), columns=_needed(version, columns), use_threads=False):
                yield migrated(version, name, arrow().Table.from_batches([batch])).select(columns)
        give_back()

    def _absent(self, name: str) -> bool:
        return name == "outcomes" and not (self._directory / "outcomes.parquet").exists()


def _needed(version: int, columns: Sequence[str]) -> list[str] | None:
    """What to read for some columns of today's: of an older table everything, since they may be made of others."""
    return list(columns) if version == SCHEMA_VERSION else None


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
