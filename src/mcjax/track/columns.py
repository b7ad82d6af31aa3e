"""Tables in the making: rows go in one by one, and leave in pieces, as Arrow tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from mcjax.track.arrow import Table, arrow
from mcjax.track.schemas import SCHEMAS, piece_rows, type_of

Take = Callable[[Table], None]


def table_of(name: str, columns: Sequence[Any]) -> Table:
    """A table of one of `SCHEMAS` from its columns: sequences of cells, or Arrow arrays."""
    pa = arrow()
    arrays = [
        cells if isinstance(cells, pa.Array) else pa.array(cells, type_of(kind))
        for cells, (_, kind) in zip(columns, SCHEMAS[name], strict=True)
    ]
    return pa.Table.from_arrays(arrays, names=[column for column, _ in SCHEMAS[name]])


class Rows:
    """Hands the rows of a table to `take`, `piece_rows` at a time; `rendered` makes the Arrow arrays of some columns.

    `cells` holds the rows that wait, one behind the other. A hot path does itself what `add` does: it adds a tuple of
    cells to the list, and calls `flush` when there are `full` of them.
    """

    def __init__(
        self,
        name: str,
        take: Take,
        rendered: Mapping[str, Callable[[list[Any]], Any]] | None = None,
    ):
        self.cells: list[Any] = []
        self.full = piece_rows(name) * len(SCHEMAS[name])
        self._name = name
        self._take = take
        self._rendered = rendered or {}

    def add(self, row: tuple[Any, ...]) -> None:
        cells = self.cells
        cells += row
        if len(cells) >= self.full:
            self.flush()

    def flush(self) -> None:
        """Hand over what waits."""
        if not self.cells:
            return
        schema = SCHEMAS[self._name]
        columns = [self.cells[index :: len(schema)] for index in range(len(schema))]
        self.cells.clear()
        for index, (column, _) in enumerate(schema):
            if column in self._rendered:
                columns[index] = self._rendered[column](columns[index])
        self._take(table_of(self._name, columns))


class Gauges:
    """Samples in the making: many sources at one time and of one metric come as one entry."""

    def __init__(self, take: Take):
        self._take = take
        self._entries: list[tuple[int, Sequence[str], str, Sequence[float]]] = []
        self._rows = 0
        self._full = piece_rows("samples")

    def add(self, time_ns: int, sources: Sequence[str], metric: str, values: Sequence[float]) -> None:
        self._entries.append((time_ns, sources, metric, values))
        self._rows += len(values)
        if self._rows >= self._full:
            self.flush()

    def flush(self) -> None:
        """Hand over what waits."""
        if not self._entries:
            return
        times, sources, metrics, values = zip(*self._entries, strict=True)
        entry = np.repeat(np.arange(len(times)), [len(each) for each in values])
        self._entries.clear()
        self._rows = 0
        names = list(chain.from_iterable(sources))
        metric = arrow().array(metrics, arrow().string()).take(arrow().array(entry))
        figures = np.fromiter(chain.from_iterable(values), np.float64, len(entry))
        self._take(table_of("samples", [np.array(times, np.int64)[entry], names, metric, figures]))
