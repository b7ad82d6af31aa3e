"""A cost model that interpolates between measured steps; a mixed step is looked up as such, not added up."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import numpy as np
from numpy.typing import NDArray

from mcjax.cost import measurements
from mcjax.cost.measurements import Kind, Measurement
from mcjax.errors import ConfigError
from mcjax.types import NS_PER_S

_MOST_CELLS = 4_000_000
_AXES: dict[Kind, tuple[str, ...]] = {
    "prefill": ("start_tokens", "length_tokens"),
    "decode": ("batch", "context_tokens"),
    "mixed": ("start_tokens", "length_tokens", "batch", "context_tokens"),
}


@dataclass(frozen=True, eq=False)
class Grid:
    """Nanoseconds over a full grid of points, multi-linear between them.

    Below an axis's first value the time of that value counts (fixed costs do not shrink further). Beyond its last one
    the last interval's slope goes on. No answer is below the least time of the grid.
    """

    axes: tuple[NDArray[np.float64], ...]
    """Ascending, two values or more each."""
    values_ns: NDArray[np.float64]
    """`[len(axis) for axis in axes]`."""

    def at(self, *coordinates: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """`[N]` nanoseconds at N points; one coordinate an axis, each a number or `[N]`.

        Elementwise, so a point's time has the same bits alone and among others.
        """
        lower: list[NDArray[np.intp]] = []
        shares: list[NDArray[np.float64]] = []
        for axis, coordinate in zip(self.axes, coordinates, strict=True):
            points = np.atleast_1d(np.asarray(coordinate, np.float64))
            index = np.clip(np.searchsorted(axis, points, side="right") - 1, 0, len(axis) - 2)
            lower.append(index)
            shares.append(np.maximum((points - axis[index]) / (axis[index + 1] - axis[index]), 0.0))
        return np.maximum(self._between(lower, shares, ()), self._least_ns)

    def one(self, *coordinates: float) -> float:
        """Nanoseconds at one point: the bits of `at`, ten times as fast."""
        cell: list[slice] = []
        shares: list[float] = []
        for values, coordinate in zip(self._sorted, coordinates, strict=True):
            index = min(max(bisect_right(values, coordinate) - 1, 0), len(values) - 2)
            cell.append(slice(index, index + 2))
            shares.append(max((coordinate - values[index]) / (values[index + 1] - values[index]), 0.0))
        corners: list[float] = self.values_ns[tuple(cell)].ravel().tolist()
        for share in reversed(shares):
            pairs = zip(corners[::2], corners[1::2], strict=True)
            corners = [first + share * (second - first) for first, second in pairs]
        return max(corners[0], self._least_ns)

    @cached_property
    def _sorted(self) -> list[list[float]]:
        return [axis.tolist() for axis in self.axes]

    @cached_property
    def _least_ns(self) -> float:
        return float(self.values_ns.min())

    def _between(
        self, lower: list[NDArray[np.intp]], shares: list[NDArray[np.float64]], corner: tuple[NDArray[np.intp], ...]
    ) -> NDArray[np.float64]:
        """The cell's corners, weighed along the axes that `corner` leaves open."""
        depth = len(corner)
        if depth == len(self.axes):
            return self.values_ns[corner]
        first = self._between(lower, shares, (*corner, lower[depth]))
        second = self._between(lower, shares, (*corner, lower[depth] + 1))
        return first + shares[depth] * (second - first)


class Table:
    """Times of one model on one machine, from a file of measured steps (`mcjax.cost.measurements` has its columns).

    Axes are the cached start and the length of a chunk, and the batch and *mean* context of its sequences: at a larger
    batch the same contexts are measured, not the same totals. Along each axis the function is linear between measured
    values; `Grid` says what holds outside of them. Where lines of the grid were measured at different values (large
    batches stop at shorter contexts), each line is interpolated, or continued, on its own.

    Decode steps split exactly: one is a function of batch and context alone, rounded to whole nanoseconds. A prompt's
    chunks do *not* add up to the prompt: several short chunks cost what was measured for short chunks. A mixed step
    never costs less than either of its parts.
    """

    def __init__(
        self,
        rows: Sequence[Measurement],
        name: str = "table",
        measured_hardware: str = "",
        measured_model: str = "",
        allow_mismatch: bool = False,
    ):
        """Raises `ConfigError` that names the rows that are missing."""
        self.name = name
        self._measured = (("hardware", measured_hardware), ("model", measured_model))
        self._allow_mismatch = allow_mismatch
        self._prefill = _grid(rows, "prefill", name)
        self._decode = _grid(rows, "decode", name)
        self._mixed = _grid(rows, "mixed", name) if any(row.kind == "mixed" for row in rows) else None

    def check(self, hardware_name: str, model_name: str) -> None:
        """Raise `ConfigError` when the run's hardware or model is not what was measured."""
        for (key, measured), used in zip(self._measured, (hardware_name, model_name), strict=True):
            if measured and used != measured and not self._allow_mismatch:
                problem = f"cost={self.name} was measured on {measured}; use cost=roofline, or cost.allow_mismatch=true"
                raise ConfigError(key, used, problem)

    def prefill_ns(self, start_tokens: int, length_tokens: int) -> int:
        if length_tokens == 0:
            return 0
        return round(self._prefill.one(start_tokens, length_tokens))

    def step_ns(self, batch: int, context_tokens: int, steps: int) -> NDArray[np.int64]:
        """`[steps]` int64; 0 for an empty batch."""
        if batch == 0:
            return np.zeros(steps, np.int64)
        contexts = context_tokens + batch * np.arange(steps, dtype=np.int64)
        return np.rint(self._decode.at(batch, contexts / batch)).astype(np.int64)

    def mixed_ns(self, start_tokens: int, length_tokens: int, batch: int, context_tokens: int) -> int:
        """Raises `ConfigError` when the file has no `mixed` rows: a sum of parts would be a guess."""
        chunk_ns = self.prefill_ns(start_tokens, length_tokens)
        if batch == 0:
            return chunk_ns
        step_ns = round(self._decode.one(batch, context_tokens / batch))
        if length_tokens == 0:
            return step_ns
        if self._mixed is None:
            problem = "holds no mixed rows, and this run has steps of a chunk and a decode batch together: measure them"
            raise ConfigError("cost", self.name, problem)
        mixed_ns = self._mixed.one(start_tokens, length_tokens, batch, context_tokens / batch)
        return max(chunk_ns, step_ns, round(mixed_ns))

    def prefill_s(self, prompt_tokens: int, reused_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """`[I]` float64 seconds."""
        lengths = prompt_tokens - np.asarray(reused_tokens, np.float64)
        return np.where(lengths > 0, self._prefill.at(reused_tokens.astype(np.float64), lengths), 0.0) / NS_PER_S

    def decode_s(self, batch: NDArray[np.int64], context_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """`[I]` float64 seconds; 0 for an empty batch."""
        means = context_tokens / np.maximum(batch, 1)
        return np.where(batch > 0, self._decode.at(batch.astype(np.float64), means), 0.0) / NS_PER_S


def read(
    path: str,
    name: str = "table",
    measured_hardware: str = "",
    measured_model: str = "",
    allow_mismatch: bool = False,
) -> Table:
    """The `Table` of a CSV or Parquet file. Errors as of `measurements.read` and of `Table`."""
    return Table(measurements.read(path), name, measured_hardware, measured_model, allow_mismatch)


def _grid(rows: Sequence[Measurement], kind: Kind, name: str) -> Grid:
    """The grid of one kind's rows; a point's time is the median of its measurements."""
    repeats: dict[tuple[float, ...], list[float]] = defaultdict(list)
    for row in rows:
        if row.kind == kind:
            mean_context = row.context_tokens / row.batch if row.batch else 0.0
            chunk, decodes = (row.start_tokens, row.length_tokens), (row.batch, mean_context)
            where = {"prefill": chunk, "decode": decodes, "mixed": chunk + decodes}[kind]
            repeats[tuple(map(float, where))].append(row.seconds)
    points = {where: median(seconds) * NS_PER_S for where, seconds in repeats.items()}
    axes = tuple(np.array(sorted({where[depth] for where in points}), np.float64) for depth in range(len(_AXES[kind])))
    cells = int(np.prod([len(axis) for axis in axes]))
    if cells > _MOST_CELLS:
        problem = f"its {kind} rows span {cells:,} points of a grid: measure at fewer different values of each column"
        raise ConfigError("cost", name, problem)
    return Grid(axes, _filled(points, axes, 0, f"cost={name}", kind))


def _filled(
    points: dict[tuple[float, ...], float],
    axes: tuple[NDArray[np.float64], ...],
    depth: int,
    where: str,
    kind: Kind,
) -> NDArray[np.float64]:
    """The times at every point of `axes[depth:]`, each line of measured values interpolated or continued."""
    if depth == len(axes):
        return np.array(next(iter(points.values())), np.float64)
    column = _AXES[kind][depth]
    lines: dict[float, dict[tuple[float, ...], float]] = defaultdict(dict)
    for point, time_ns in points.items():
        lines[point[depth]][point] = time_ns
    if len(lines) < 2:
        found = ", ".join(f"{value:g}" for value in lines) or "none"
        unit = " a sequence" if column == "context_tokens" else ""
        raise ConfigError("cost", where, f"{kind} rows need two different {column}{unit}; there is {found}")
    known = np.array(sorted(lines), np.float64)
    stacked = np.stack(
        [_filled(lines[value], axes, depth + 1, f"{where}, {column}={value:g}", kind) for value in known.tolist()]
    )
    if len(known) == len(axes[depth]):
        return stacked
    index = np.clip(np.searchsorted(known, axes[depth], side="right") - 1, 0, len(known) - 2)
    shares = np.maximum((axes[depth] - known[index]) / (known[index + 1] - known[index]), 0.0)
    shares = shares.reshape(-1, *[1] * (stacked.ndim - 1))
    return stacked[index] + shares * (stacked[index + 1] - stacked[index])
