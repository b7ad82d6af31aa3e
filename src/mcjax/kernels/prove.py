"""`python -m mcjax.kernels.prove`: shows every cell of the proof ladder and writes down what came of it.

Results are added to a data file as they come, so an interrupted run goes on where it was. A cell that has a result of
the same code, jax and compiler is not run again. The exit status is 1 if any of the cells asked for has failed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import sys
import time
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from mcjax.errors import UserError
from mcjax.kernels.proof import table
from mcjax.kernels.proof.cells import INTERPRETED, RUNGS, SCOPES, TPUS, Cell, cells, missing_for
from mcjax.kernels.proof.worker import Worker

DATA = Path("docs/kernels-proof.jsonl")
PAGE = Path("docs/kernels-proof.md")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; its exit status."""
    options = _parser().parse_args(arguments)
    try:
        return _prove(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mcjax.kernels.prove", description=__doc__)
    parser.add_argument("--scope", nargs="+", choices=list(SCOPES), default=list(SCOPES), help="which sets of cells")
    parser.add_argument("--rungs", nargs="+", choices=RUNGS, default=list(RUNGS), help="which rungs of the ladder")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="cells with all of these in their names")
    parser.add_argument("--list", action="store_true", help="print the cells, with what is known of each; run nothing")
    parser.add_argument("--again", action="store_true", help="also cells that have a result already")
    parser.add_argument("--minutes", type=float, help="begin no cell after so long")
    parser.add_argument("--cell-seconds", type=float, default=300, help="a cell that takes longer is overdue")
    parser.add_argument("--data", type=Path, default=DATA, help="the data file (%(default)s)")
    parser.add_argument("--page", type=Path, default=PAGE, help="shows the tables, where it exists (%(default)s)")
    return parser


def compiler_of(rung: str) -> str:
    """What compiles for a rung, with its version; empty where nothing is compiled."""
    if rung in INTERPRETED:
        return ""
    if rung in TPUS:
        return f"libtpu {metadata.version('libtpu')}"
    plugin = f"jax-cuda13-plugin {metadata.version('jax-cuda13-plugin')}"
    try:  # XLA takes this one's before an installed CUDA's
        return f"{plugin} with ptxas {metadata.version('nvidia-cuda-nvcc')}"
    except metadata.PackageNotFoundError:
        return f"{plugin} with an installed CUDA's ptxas"


def _prove(options: argparse.Namespace) -> int:
    wanted = [cell for cell in cells(options.scope) if cell.rung in options.rungs]
    wanted = [cell for cell in wanted if all(part in f"{cell.name}/" for part in options.only)]
    planned = {cell.name for cell in cells()}
    rows = {key: row for key, row in table.read(options.data).items() if row.cell in planned}
    here: list[Cell] = []
    for rung in options.rungs:
        lacks, mine = missing_for(rung), [cell for cell in wanted if cell.rung == rung]
        if lacks and mine:
            package, extra = lacks
            print(f"{rung}: left out, {package} is not installed; `pip install 'mcjax[{extra}]'` brings it")
        elif mine:
            here += mine
    here = [cell for cell in wanted if cell in set(here)]  # in the scopes' order, which begins with the cover
    known = {cell: row for cell in here if (row := rows.get(_key(cell)))}
    if options.list:
        for cell in here:
            row = known.get(cell)
            said = "open" if row is None else f"{row.status}{'' if _current(cell, row) else ', of older code'}"
            print(f"{cell.name}  {said}")
        return 0
    todo = [cell for cell in here if options.again or cell not in known or not _current(cell, known[cell])]
    try:
        _run(todo, rows, options)
    finally:
        if rows:
            table.write(options.data, rows.values())
            if options.page.exists():
                table.show_in(options.page, table.markdown(rows.values(), cells()))
    statuses = Counter(rows[_key(cell)].status if _key(cell) in rows else "open" for cell in here)
    print(", ".join(f"{count} {status}" for status, count in sorted(statuses.items())) or "no such cell")
    return int(any(status not in ("passed", "open") for status in statuses))


def _run(todo: Sequence[Cell], rows: dict[tuple[str, str, str], table.Row], options: argparse.Namespace) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    began = time.monotonic()
    with Progress(*columns) as progress, Worker(options.cell_seconds) as worker, _appended(options.data) as data:
        task = progress.add_task("", total=len(todo))
        for cell in todo:
            if options.minutes is not None and time.monotonic() - began > options.minutes * 60:
                break
            progress.update(task, description=cell.name)
            outcome, seconds = worker.show(cell)
            row = table.Row(
                cell.name,
                outcome.status,
                metadata.version("jax"),
                compiler_of(cell.rung),
                table.digest_of(cell.kernel),
                datetime.datetime.now(datetime.UTC).date().isoformat(),
                round(seconds, 1),
                " ".join(outcome.error.split())[:400],
                outcome.facts,
            )
            rows[row.key] = row
            data.write(row.to_json() + "\n")
            data.flush()
            progress.advance(task)
            if row.status != "passed":
                progress.print(f"{row.status}: {cell.name}: {row.error}", markup=False)


@contextlib.contextmanager
def _appended(path: Path):
    """The file, open for more lines; what was cut off by an interruption goes first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table.write(path, table.read(path).values())
    with path.open("a", encoding="utf-8") as file:
        yield file


def _key(cell: Cell) -> tuple[str, str, str]:
    return cell.name, metadata.version("jax"), compiler_of(cell.rung)


def _current(cell: Cell, row: table.Row) -> bool:
    return row.source == table.digest_of(cell.kernel)


if __name__ == "__main__":
    sys.exit(main())
