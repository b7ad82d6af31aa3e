"""What the tables of a run look like, how they are written and read back, and the digest of their rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import RunError
from mcjax.track.arrow import Table, arrow, compute, parquet

SCHEMA_VERSION = 1
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


def write(tables: Mapping[str, Table], directory: Path) -> None:
    """One `NAME.parquet` a table, zstd-compressed, schema version in its metadata; empty `outcomes` are left out."""
    for name, table in tables.items():
        if name == "outcomes" and table.num_rows == 0:
            continue
        metadata = {VERSION_KEY: str(SCHEMA_VERSION).encode(), b"mcjax_table": name.encode()}
        # Times grow slowly: coded as differences they take a third of the space that a dictionary would.
        delta = _DELTA_CODED.get(name, [])
        parquet().write_table(
            table.replace_schema_metadata(metadata),
            directory / f"{name}.parquet",
            compression="zstd",
            use_dictionary=[path for path in _leaves(name) if path not in delta],
            column_encoding=dict.fromkeys(delta, "DELTA_BINARY_PACKED"),
        )


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
    try:
        return parquet().read_table(directory / f"{name}.parquet")
    except (OSError, arrow().ArrowException) as error:
        raise RunError(f"{directory}: {name}.parquet is damaged ({_one_line(error)})") from error


def empty(name: str) -> Table:
    """The table without rows."""
    from mcjax.track.columns import Rows

    return Rows(SCHEMAS[name]).table()


def digest(tables: Mapping[str, Table]) -> str:
    """sha256 of the rows: equal rows, in equal order, give equal digests on every machine and library version.

    It covers column names and values (integers and float64 as 8 little-endian bytes, one NaN, strings as UTF-8 with
    their lengths, nulls by a bitmap), never the bytes of a file.
    """
    hasher = hashlib.sha256()
    for name in DIGESTED:
        table = tables[name]
        _mark(hasher, name, table.num_rows)
        for column in table.column_names:
            _mark(hasher, column, 0)
            _absorb(hasher, table.column(column).combine_chunks())
    return hasher.hexdigest()


def _mark(hasher: Any, text: str, count: int) -> None:
    hasher.update(len(text).to_bytes(8, "little") + text.encode() + count.to_bytes(8, "little"))


def _absorb(hasher: Any, column: Any) -> None:
    types = arrow().types
    _mark(hasher, "nulls", column.null_count)
    if column.null_count:
        hasher.update(np.packbits(column.is_valid().to_numpy(zero_copy_only=False)).tobytes())
        column = column.drop_null()
    kind = column.type
    if types.is_boolean(kind) or types.is_integer(kind):
        _absorb_integers(hasher, column)
    elif types.is_floating(kind):
        values: NDArray[np.float64] = column.to_numpy(zero_copy_only=False).astype("<f8")
        values[np.isnan(values)] = np.nan  # processors differ in the sign of the NaN they make
        hasher.update(values)
    elif types.is_string(kind):
        _absorb_integers(hasher, compute().binary_length(column))
        _, offsets_buffer, text = column.buffers()
        if text is not None and len(column):
            offsets = np.frombuffer(offsets_buffer, np.int32)[column.offset : column.offset + len(column) + 1]
            hasher.update(memoryview(text)[int(offsets[0]) : int(offsets[-1])])
    elif types.is_list(kind):
        _absorb_integers(hasher, compute().list_value_length(column))
        _absorb(hasher, column.flatten())
    else:
        raise TypeError(f"no canonical form for a column of type {kind}")


def _absorb_integers(hasher: Any, column: Any) -> None:
    hasher.update(np.ascontiguousarray(column.to_numpy(zero_copy_only=False).astype("<i8", copy=False)))


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
