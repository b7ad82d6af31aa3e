"""What a sweep shows and keeps at its end: the table of its groups, a picture, and every point that failed."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mcjax.app.sweep.study import Study
from mcjax.track.find import BASE
from mcjax.track.runs import Runs
from mcjax.track.sweep import FAILED, INTERRUPTED, STATES, Point

TABLES = {"table.md": "md", "table.csv": "csv"}
WIDTH = 100
"""Columns of the table where no terminal says."""


@dataclass(frozen=True, slots=True)
class Results:
    """The table as text for a terminal, and the files that hold it and the picture."""

    table: str = ""
    files: Sequence[Path] = ()


def results_of(runs: Runs) -> Results:
    """Compare the runs of a sweep, and keep the tables and a picture in its directory.

    The runs are there already: what goes wrong here is a warning.
    """
    if not runs:
        return Results()
    directory = runs.sweep.directory if runs.sweep else None
    table, files = "", list[Path]()
    try:
        from mcjax.track.compare.comparison import compare

        comparison = compare(runs)
        table = comparison.render("table", shutil.get_terminal_size((WIDTH, 24)).columns)
        if directory is not None:
            for name, form in TABLES.items():
                (directory / name).write_text(comparison.render(form), encoding="utf-8")
                files.append(directory / name)
    except Exception as problem:
        logging.getLogger("mcjax").warning("the runs of the sweep could not be compared: %r", problem)
    try:
        if directory is not None:
            from mcjax.track.plots.kinds import draw

            kind = kind_of(runs)
            files += draw(runs, kind).save(directory / f"{kind}.pdf")
    except Exception as problem:
        logging.getLogger("mcjax").warning("the sweep's picture could not be drawn: %r", problem)
    return Results(table, files)


def kind_of(runs: Runs) -> str:
    """Goodput over the number that was swept, where there is one; else the trade-off between two latencies."""
    keys = dict.fromkeys(key for group in runs.groups() for key in group.values)
    values = [[group.values.get(key, "") for group in runs.groups()] for key in keys]
    return "goodput" if any(all(map(_is_number, of_key)) for of_key in values) else "pareto"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def show(study: Study) -> None:
    """The table, where everything lies, and what to type next; on standard error what is missing, and why."""
    runs = study.runs()
    results = results_of(runs)
    if results.table:
        print(results.table)
    told = ", ".join(f"{study.counts[state]} {state}" for state in STATES if study.counts[state])
    if runs.sweep is None:
        print(f"sweep: {told}; nothing of it is kept on disk")
    else:
        sweep = runs.sweep
        for file in results.files:
            print(f"kept: {file}")
        name = sweep.name if sweep.base == BASE else str(sweep.directory)
        print(f"next: mcjax compare {name}, mcjax report {name}")
        print(f"sweep directory: {sweep.directory} ({told})")
    sys.stdout.flush()
    show_missing(study)


def show_missing(study: Study) -> None:
    """On standard error: the points that failed, each with its reason, and how many an interrupt has left out."""
    failures, total = study.failures, study.counts.total()
    if failures:
        lines = [line for label, point in failures for line in _told(label, point, study.base)]
        text = "\n".join([f"mcjax: {len(failures)} of the sweep's {total} points failed:", *lines])
        print(text, file=sys.stderr)
    if study.interrupted:
        left = study.counts[INTERRUPTED]
        again = "" if study.base is None else "; the same command goes on with what is missing"
        print(f"mcjax: interrupted; of the sweep's {total} points are missing: {left}{again}", file=sys.stderr)


def _told(label: str, point: Point, base: Path | None) -> list[str]:
    first, *rest = (point.reason or FAILED).splitlines()
    place = f"run directory: {base / point.directory}" if base and point.directory else ""
    if place and str(point.directory) in point.reason:  # it is told already
        place = ""
    return [f"  {label}: {first}", *(f"    {line}" for line in [*rest, place] if line)]
