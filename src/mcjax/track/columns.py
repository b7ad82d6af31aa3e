"""Growing columns of plain values: compact while a run goes on, Arrow arrays at its end.

Rows arrive as tuples and wait in a short buffer; a full buffer is turned into columns at once, because one append a row
is all that a hot path should pay.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from mcjax.track.arrow import Table, arrow

BUFFERED_ROWS = 4096
NULL = -(2**63)
"""Stands for a missing integer until the column becomes an Arrow array."""


class Column(Protocol):
    """Values of one kind. `arrow()` copies, so that recording may go on afterwards."""

    def extend(self, values: Iterable[Any]) -> None: ...

    def arrow(self) -> Any: ...


class IntColumn:
    """64-bit integers; `None` is allowed and becomes null. `type_name` narrows them in Arrow."""

    def __init__(self, type_name: str = "int64", nullable: bool = False):
        self._values = array("q")
        self._type_name = type_name
        self._nullable = nullable

    def extend(self, values: Iterable[Any]) -> None:
        if isinstance(values, np.ndarray):
            self._values.frombytes(cast("NDArray[Any]", values).astype(np.int64, copy=False).tobytes())
        elif self._nullable:
            self._values.extend([NULL if value is None else value for value in values])
        else:
            self._values.extend(values)

    def arrow(self) -> Any:
        values = np.array(self._values, dtype=np.int64)
        mask = values == NULL if self._nullable else None
        kind = arrow().type_for_alias(self._type_name)
        return arrow().array(values, mask=mask).cast(kind)


class FloatColumn:
    """64-bit floats; NaN stays NaN."""

    def __init__(self) -> None:
        self._values = array("d")

    def extend(self, values: Iterable[Any]) -> None:
        if isinstance(values, np.ndarray):
            self._values.frombytes(cast("NDArray[Any]", values).astype(np.float64, copy=False).tobytes())
        else:
            self._values.extend(values)

    def arrow(self) -> Any:
        return arrow().array(np.array(self._values, dtype=np.float64), from_pandas=False)


class TextColumn:
    """Strings, each distinct one kept once."""

    def __init__(self) -> None:
        self._codes = array("i")
        self._words: dict[str, int] = {}

    def extend(self, values: Iterable[Any]) -> None:
        words = self._words
        self._codes.extend([words.setdefault(value, len(words)) for value in values])

    def arrow(self) -> Any:
        words = arrow().array([str(word) for word in self._words], arrow().string())
        return words.take(arrow().array(np.array(self._codes, dtype=np.int32)))


class ListColumn:
    """Lists whose elements are kept in one inner column; `None` becomes null."""

    def __init__(self, inner: Column):
        self._inner = inner
        self._lengths = array("q")

    def extend(self, values: Iterable[Any]) -> None:
        for row in cast("Iterable[Sequence[Any] | None]", values):
            if row is None:
                self._lengths.append(-1)
            else:
                self._inner.extend(row)
                self._lengths.append(len(row))

    def arrow(self) -> Any:
        lengths = np.array(self._lengths, dtype=np.int64)
        offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(np.maximum(lengths, 0), out=offsets[1:])
        missing = lengths < 0
        mask = arrow().array(missing) if missing.any() else None
        return arrow().ListArray.from_arrays(arrow().array(offsets), self._inner.arrow(), mask=mask)


def make_column(kind: str) -> Column:
    """A column of one of the kinds that `tables.SCHEMAS` names."""
    if kind.endswith("[]"):
        return ListColumn(make_column(kind[:-2]))
    match kind:
        case "int":
            return IntColumn()
        case "int?":
            return IntColumn(nullable=True)
        case "int32":
            return IntColumn("int32")
        case "bool":
            return IntColumn("bool")
        case "float":
            return FloatColumn()
        case "text":
            return TextColumn()
        case _:
            raise ValueError(f"no column of kind {kind!r}")


class Rows:
    """One table in the making. Rows keep the order in which they were added."""

    def __init__(self, schema: Sequence[tuple[str, str]]):
        self._names = [name for name, _ in schema]
        self._columns = [make_column(kind) for _, kind in schema]
        self._buffer: list[tuple[Any, ...]] = []
        self._moved = 0

    def __len__(self) -> int:
        return self._moved + len(self._buffer)

    def add(self, row: tuple[Any, ...]) -> None:
        buffer = self._buffer
        buffer.append(row)
        if len(buffer) >= BUFFERED_ROWS:
            self._move()

    def table(self, **replaced: Any) -> Table:
        """The rows so far as a `pyarrow.Table`; `replaced` gives Arrow arrays for columns rendered elsewhere."""
        self._move()
        pairs = zip(self._names, self._columns, strict=True)
        arrays = [replaced[name] if name in replaced else column.arrow() for name, column in pairs]
        return arrow().Table.from_arrays(arrays, names=self._names)

    def integers(self, name: str) -> NDArray[np.int64]:
        """`[rows]`, a copy of an integer column."""
        self._move()
        return cast("NDArray[np.int64]", self._columns[self._names.index(name)].arrow().to_numpy())

    def _move(self) -> None:
        if self._buffer:
            for column, values in zip(self._columns, zip(*self._buffer, strict=True), strict=True):
                column.extend(values)
            self._moved += len(self._buffer)
            self._buffer.clear()
