"""A comparison on a terminal, with rich."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mcjax.track.compare.comparison import Comparison
from mcjax.track.compare.view import Grid, grids, legend, sentences

GAP = 3


def parts(comparison: Comparison, width: int) -> Iterator[Any]:
    """What rich prints, for a terminal of so many columns."""
    from rich.text import Text

    told = legend(comparison)
    if told is not None:
        yield _table(told)
    for grid in grids(comparison, width):
        if grid.title:
            yield Text(grid.title, style="bold")
        yield _table(grid)
    for line in sentences(comparison):
        yield Text(line, style="yellow" if line.startswith("refused") else "dim")


def plain(comparison: Comparison, width: int) -> str:
    """The same without colours."""
    import io

    from rich.console import Console

    output = io.StringIO()
    console = Console(file=output, width=width, color_system=None, force_terminal=False, force_jupyter=False)
    for part in parts(comparison, width):
        console.print(part)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines()) + "\n"


def _table(grid: Grid) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    words = [
        not any(cell[:1] in "+-0123456789" for row in grid.rows for cell in [row[at]] if cell)
        for at in range(len(grid.header))
    ]
    for at, name in enumerate(grid.header):
        table.add_column(Text(name), justify="left" if at == 0 or words[at] else "right", overflow="fold")
    for index, row in enumerate(grid.rows):
        cells = [Text(cell, style="bold green" if (index, at) in grid.best else "") for at, cell in enumerate(row)]
        table.add_row(*cells)
    return table
