"""A comparison as grids of words, the same for a terminal, Markdown, LaTeX and HTML."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mcjax.track.compare.comparison import Cell, Comparison, Row
from mcjax.track.metrics import Metric

LONGEST_LABEL = 28
"""A longer one is told in a legend, and its group goes by number."""
BEST = "*"
ABSENT = "-"
DECIMALS = 6
"""Most digits behind the point, in the unit that is shown."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table. A cell may have several lines; `best` are the cells, by row and column, that are marked."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: frozenset[tuple[int, int]] = field(default_factory=frozenset[tuple[int, int]])

    def width(self, gap: int) -> int:
        columns = zip(self.header, *self.rows, strict=True)
        return sum(max(len(line) for cell in column for line in cell.split("\n")) + gap for column in columns)


def grids(comparison: Comparison, width: int | None = None) -> Iterator[Grid]:
    """A grid for each part: figures down, groups across; where that is wider than `width`, a line a group."""
    for part in dict.fromkeys(row.part for row in comparison.rows):
        title = f"{comparison.by} {part or '(none)'}" if comparison.by else ""
        rows = [row for row in comparison.rows if row.part == part]
        grid = _of_two(comparison, title, rows) if len(comparison.groups) == 2 else _across(comparison, title, rows)
        yield grid if width is None or grid.width(3) <= width else _down(comparison, title, rows)


def legend(comparison: Comparison) -> Grid | None:
    """What the groups are; None where their labels say it."""
    if names_of(comparison) != _numbers(comparison):
        return None
    header = ["group", *comparison.config, "runs"]
    rows = [
        [str(number), *(group.values.get(key, ABSENT) for key in comparison.config), str(len(group.runs))]
        for number, group in enumerate(comparison.groups, 1)
    ]
    return Grid("", header, rows)


def sentences(comparison: Comparison) -> list[str]:
    """What stands below the grids: figures that are the same, notes, refused runs."""
    lines: list[str] = []
    for part in dict.fromkeys(row.part for row in comparison.same):
        rows = [row for row in comparison.same if row.part == part]
        where = f" ({comparison.by} {part})" if comparison.by else ""
        lines.append(f"the same in all{where}: {', '.join(_one_figure(row) for row in rows)}")
    lines += comparison.notes
    lines += [f"refused: {what}: {why.removeprefix(f'{what}: ')}" for what, why in comparison.refused]
    return lines


def names_of(comparison: Comparison) -> list[str]:
    """How the groups are called in a header: by their labels, or by number."""
    labels = [group.label for group in comparison.groups]
    if len(comparison.config) == 1:  # the header names the key
        key = comparison.config[0]
        labels = [_last(group.values[key], key) if key in group.values else ABSENT for group in comparison.groups]
    short = max(map(len, labels)) <= LONGEST_LABEL and len(set(labels)) == len(labels)
    return labels if short else _numbers(comparison)


def _numbers(comparison: Comparison) -> list[str]:
    return [str(number) for number in range(1, len(comparison.groups) + 1)]


def _last(value: str, key: str) -> str:
    """A class goes by its own name."""
    return value.rpartition(".")[2] if key.endswith("_target_") else value


def _corner(comparison: Comparison) -> str:
    """The head of the first column: the one key that the groups differ in."""
    told = len(comparison.config) == 1 and names_of(comparison) != _numbers(comparison)
    return comparison.config[0] if told else ""


def scale_of(metric: Metric, means: Sequence[float | None]) -> tuple[float, str]:
    """A factor, and the unit that figures have with it."""
    largest = max((abs(mean) for mean in means if mean is not None), default=0.0)
    if metric.unit == "s":
        return next(
            ((factor, unit) for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")) if 0 < largest < limit),
            (1.0, "s"),
        )
    if metric.unit == "B":
        power = min(max(int(math.log2(largest) // 10), 0), 4) if largest else 0
        return 2.0 ** (-10 * power), ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return (100.0, "%") if metric.unit == "share" else (1.0, metric.unit)


def number(value: float, digits: int = 4, signed: bool = False) -> str:
    """So many significant digits, without an exponent."""
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    size = math.floor(math.log10(abs(value))) if value else 0
    decimals = min(max(digits - 1 - size, 0), DECIMALS)
    text = f"{value:{'+' if signed else ''},.{decimals}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text.lstrip("+-") == "0" else text


def _label(row: Row) -> tuple[str, float]:
    factor, unit = scale_of(row.metric, [cell.mean for cell in row.cells])
    return f"{row.metric.label} ({unit})" if unit else row.metric.label, factor


def _one_figure(row: Row) -> str:
    mean = next(cell.mean for cell in row.cells if cell.mean is not None)
    factor, unit = scale_of(row.metric, [mean])
    return f"{row.metric.label} {number(factor * mean)} {unit}".rstrip()


def _mean(cell: Cell, factor: float) -> str:
    if cell.mean is None:
        return ABSENT
    return number(factor * cell.mean) + (f" {BEST}" if cell.best else "")


def _away(cell: Cell, factor: float) -> tuple[str, str]:
    """The difference, and its interval in brackets."""
    away = cell.difference
    if away is None:
        return "", ""
    value = number(factor * away.value, 3, signed=True)
    if away.interval and away.value == away.interval.low == away.interval.high == 0:
        return value, ""
    if away.interval is None:
        return value, "no interval"
    ends = (number(factor * end, 3, signed=True) for end in (away.interval.low, away.interval.high))
    return value, f"[{', '.join(ends)}]"


def _of_two(comparison: Comparison, title: str, rows: Sequence[Row]) -> Grid:
    """The baseline, the other, and their difference in columns of its own."""
    order = [comparison.baseline, 1 - comparison.baseline]
    names = names_of(comparison)
    cells: list[list[str]] = []
    best: set[tuple[int, int]] = set()
    for index, row in enumerate(rows):
        label, factor = _label(row)
        cells.append(
            [label, *(_mean(row.cells[group], factor) for group in order), *_away(row.cells[order[1]], factor)]
        )
        best |= {(index, 1 + at) for at, group in enumerate(order) if row.cells[group].best}
    return Grid(
        title,
        [_corner(comparison), *(names[group] for group in order), "difference", "95 % interval"],
        cells,
        frozenset(best),
    )


def _across(comparison: Comparison, title: str, rows: Sequence[Row]) -> Grid:
    """A column a group, its difference to the baseline below its mean."""
    cells: list[list[str]] = []
    best: set[tuple[int, int]] = set()
    for index, row in enumerate(rows):
        label, factor = _label(row)
        texts = [_mean(cell, factor) + "\n" + " ".join(_away(cell, factor)) for cell in row.cells]
        cells.append([label, *(text.strip() for text in texts)])
        best |= {(index, 1 + at) for at, cell in enumerate(row.cells) if cell.best}
    return Grid(title, [_corner(comparison), *names_of(comparison)], cells, frozenset(best))


def _down(comparison: Comparison, title: str, rows: Sequence[Row]) -> Grid:
    """A line for each figure and group."""
    names = names_of(comparison)
    cells: list[list[str]] = []
    best: set[tuple[int, int]] = set()
    for row in rows:
        label, factor = _label(row)
        for at, (name, cell) in enumerate(zip(names, row.cells, strict=True)):
            if cell.best:
                best.add((len(cells), 2))
            cells.append([label if at == 0 else "", name, _mean(cell, factor), *_away(cell, factor)])
    return Grid(
        title, ["", _corner(comparison) or "group", "mean", "difference", "95 % interval"], cells, frozenset(best)
    )
