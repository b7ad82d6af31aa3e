"""The digest of a run: sha256 of its rows, computed as they come. `docs/track.md` defines it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.track.arrow import Table, compute
from mcjax.track.schemas import DIGESTED, SCHEMAS
from mcjax.track.tables import StoredTables, pieces


def digest(tables: Mapping[str, Table]) -> str:
    """sha256 of the rows: equal rows, in equal order, give equal digests on every machine and library version.

    It covers column names and values, never the bytes of a file, nor where one piece of a table ends and the next one
    begins.
    """
    if isinstance(tables, StoredTables) and tables.digest is not None:
        return tables.digest
    found = [TableDigest(name) for name in DIGESTED]
    for of_table, name in zip(found, DIGESTED, strict=True):
        for piece in pieces(tables, name, [column for column, _ in SCHEMAS[name]]):
            of_table.add(piece)
    return combined(found)


def combined(digests: Iterable[TableDigest]) -> str:
    """The digest of a run from those of its tables, in the order of `DIGESTED`."""
    return hashlib.sha256(b"".join(each.digest() for each in digests)).hexdigest()


class TableDigest:
    """sha256 of one table, fed in pieces."""

    def __init__(self, name: str):
        self._name = name
        self._columns = {column: ColumnDigest(kind) for column, kind in SCHEMAS[name]}

    def add(self, piece: Table) -> None:
        for name, column in self._columns.items():
            for chunk in piece.column(name).chunks:
                column.add(chunk)

    def digest(self) -> bytes:
        parts = [_text(self._name)]
        for name, column in self._columns.items():
            parts += [_text(name), column.digest()]
        return hashlib.sha256(b"".join(parts)).digest()


class ColumnDigest:
    """sha256 of one column: of how many cells there are, which are missing, how long they are, and what they hold."""

    def __init__(self, kind: str):
        self._kind = kind
        self._cells = 0
        self._missing, self._lengths, self._values = (hashlib.sha256() for _ in range(3))
        self._elements = ColumnDigest(kind[:-2]) if kind.endswith("[]") else None

    def add(self, cells: Any) -> None:
        """`cells` is an Arrow array."""
        first, self._cells = self._cells, self._cells + len(cells)
        if cells.null_count:
            self._missing.update(_numbers(first + np.flatnonzero(cells.is_null().to_numpy(zero_copy_only=False))))
            cells = cells.drop_null()
        if self._elements is not None:
            self._lengths.update(_numbers(_numpy(compute().list_value_length(cells))))
            self._elements.add(cells.flatten())
        elif self._kind == "text":
            self._lengths.update(_numbers(_numpy(compute().binary_length(cells))))
            _, offsets_buffer, text = cells.buffers()
            if text is not None and len(cells):
                offsets = np.frombuffer(offsets_buffer, np.int32)[cells.offset : cells.offset + len(cells) + 1]
                self._values.update(memoryview(text)[int(offsets[0]) : int(offsets[-1])])
        elif self._kind == "float":
            values: NDArray[np.float64] = _numpy(cells).astype("<f8")
            values[np.isnan(values)] = np.nan  # processors differ in the sign of the NaN they make
            self._values.update(memoryview(values))  # pyright: ignore[reportArgumentType]
        else:
            self._values.update(_numbers(_numpy(cells)))

    def digest(self) -> bytes:
        parts = [self._cells.to_bytes(8, "little"), self._missing.digest(), self._lengths.digest()]
        parts.append(self._values.digest() if self._elements is None else self._elements.digest())
        return hashlib.sha256(b"".join(parts)).digest()


def _text(text: str) -> bytes:
    encoded = text.encode()
    return len(encoded).to_bytes(8, "little") + encoded


def _numpy(cells: Any) -> NDArray[Any]:
    return cells.to_numpy(zero_copy_only=False)


def _numbers(values: NDArray[Any]) -> Any:
    return np.ascontiguousarray(values.astype("<i8", copy=False))
