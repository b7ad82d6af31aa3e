"""The results of all cells: a data file, one line of JSON a result, and the tables that a page shows of it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path

from mcjax.errors import ConfigError
from mcjax.kernels.proof.cells import BODIES, DEVICES, RUNGS, Cell, models, rungs_of

BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"


OPTIONAL = ("error", "facts")
"""Fields of a row that are left out where there is nothing in them."""


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one cell, with which versions, when."""

    cell: str
    status: str
    jax: str
    compiler: str
    """Of the rung; empty where a body is interpreted."""
    source: str
    """A digest of the code that was run: see `digest_of`."""
    date: str
    seconds: float
    error: str = ""
    facts: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str]:
        """Rows of the same key are of the same thing, and the last one counts."""
        return self.cell, self.jax, self.compiler

    def to_json(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if value or name not in OPTIONAL})


@cache
def digest_of(kernel: str) -> str:
    """Of the code of a kernel and of what all kernels share, so that results of older code can be told."""
    package = resources.files("mcjax.kernels")
    folder = "kv_pack" if "pack" in kernel else kernel
    files = [entry for place in (package, package.joinpath(folder)) for entry in place.iterdir() if entry.is_file()]
    digest = hashlib.sha256()
    for entry in sorted(files, key=str):
        if entry.name.endswith((".py", ".json")) and entry.name != "prove.py":
            digest.update(entry.name.encode() + b"\0" + entry.read_bytes() + b"\0")
    return digest.hexdigest()[:8]


def read(path: Path) -> dict[tuple[str, str, str], Row]:
    """The last row of each key; none where there is no file. A last line that was cut off is left out.

    Raises `ConfigError` for any other line that is no row.
    """
    rows: dict[tuple[str, str, str], Row] = {}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            row = Row(**json.loads(line))
        except (ValueError, TypeError) as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise ConfigError("data", path, f"line {number}: {error}") from error
        rows[row.key] = row
    return rows


def write(path: Path, rows: Iterable[Row]) -> None:
    """All rows, in an order of their own, in place of what was there."""
    order = sorted(rows, key=lambda row: (row.jax, row.compiler, row.cell))
    scratch = path.with_suffix(".new")
    scratch.write_text("".join(row.to_json() + "\n" for row in order), encoding="utf-8")
    scratch.replace(path)


def markdown(rows: Iterable[Row], planned: Sequence[Cell]) -> str:
    """The tables, by release of jax and compiler."""
    by_release: dict[str, list[Row]] = {}
    for row in rows:
        by_release.setdefault(row.jax, []).append(row)
    parts = [_release(release, by_release[release], planned) for release in sorted(by_release)]
    return "\n\n".join(parts) if parts else "Nothing has been run yet."


def _release(release: str, rows: Sequence[Row], planned: Sequence[Cell]) -> str:
    compilers = ", ".join(sorted({row.compiler for row in rows if row.compiler}))
    dates = sorted({row.date for row in rows})
    found = {row.cell: row for row in rows}
    lines = [
        f"### jax {release}" + (f", {compilers}" if compilers else ""),
        "",
        f"{len(found)} cells, run {dates[0]}" + (f" to {dates[-1]}" if len(dates) > 1 else "") + f". {_sources(rows)}",
        "",
        "| body | " + " | ".join(RUNGS) + " |",
        "|" + "---|" * (len(RUNGS) + 1),
    ]
    total = Counter((cell.body, cell.rung) for cell in planned)
    for body in BODIES:
        columns = [_count(body, rung, found.values(), total[body, rung]) for rung in RUNGS]
        lines.append(f"| `{body}` | " + " | ".join(columns) + " |")
    lines += _models(found)
    lines += _failures(found.values())
    return "\n".join(lines)


def _sources(rows: Iterable[Row]) -> str:
    """Which code was run: the digests of each kernel's rows, the most frequent first."""
    digests: dict[str, Counter[str]] = {}
    for row in rows:
        digests.setdefault(Cell.of(row.cell).kernel, Counter())[row.source] += 1
    said = (f"`{kernel}` " + ", ".join(digest for digest, _ in digests[kernel].most_common()) for kernel in digests)
    return "Digests of the code: " + "; ".join(said) + "."


def _count(body: str, rung: str, rows: Iterable[Row], planned: int) -> str:
    if rung not in rungs_of(body):
        return "compiler only: numbers open until a card is at hand (see above)" if rung == "interpret" else ""
    statuses = Counter(row.status for row in rows if row.cell.startswith(f"{body}/{rung}/"))
    run = statuses.total()
    if not run:
        return "open"
    words = [f"{statuses['passed']}"]
    words += [f"{count} {status}" for status, count in sorted(statuses.items()) if status != "passed"]
    return ", ".join(words) + (f" of {planned}" if run < planned else "")


def _models(found: Mapping[str, Row]) -> list[str]:
    """What the compilers said at the shapes of real models, the contexts side by side."""
    cells = [cell for cell in models() if cell.name in found]
    if not cells:
        return []
    lines = ["", "At real shapes, pages of 64 tokens; what a cell holds is said above.", ""]
    lines += ["| body | rung | dtype | " + " | ".join(DEVICES) + " |", "|" + "---|" * (len(DEVICES) + 3)]
    for head in dict.fromkeys((cell.body, cell.rung, cell.dtype) for cell in cells):
        columns = []
        for model in DEVICES:
            texts: dict[str, list[str]] = {}
            for cell in cells:
                if (cell.body, cell.rung, cell.dtype, cell.heads) == (*head, model):
                    texts.setdefault(_said(found[cell.name]), []).append(cell.context)
            columns.append("<br>".join(f"{', '.join(contexts)}: {text}" for text, contexts in texts.items()))
        lines.append(f"| `{head[0]}` | {head[1]} | {head[2]} | " + " | ".join(columns) + " |")
    return lines


def _said(row: Row) -> str:
    if row.status != "passed":
        return row.status
    facts = row.facts
    if "registers" in facts:
        spills = f", {facts['spills']:g} spills" if facts.get("spills") else ""
        shared = f", {facts['shared_bytes'] / 1024:.0f} KiB shared" if facts.get("shared_bytes") else ""
        return f"{facts['registers']:g} registers{spills}{shared}"
    return f"{facts.get('temp_bytes', 0) / (1 << 20):.1f} MiB temporary"


def _failures(rows: Iterable[Row]) -> list[str]:
    """Every cell that is not good, with its error; cells of one body with the same error in one line."""
    causes: dict[tuple[str, str, str, str], list[str]] = {}
    for row in sorted(rows, key=lambda row: row.cell):
        if row.status != "passed":
            body, rung, rest = row.cell.split("/", 2)
            causes.setdefault((row.status, body, rung, row.error), []).append(rest)
    if not causes:
        return ["", "No cell failed."]
    lines = ["", "| status | body | rung | cells | error |", "|---|---|---|---|---|"]
    for (status, body, rung, error), cells in causes.items():
        which = f"`{cells[0]}`" + (f" and {len(cells) - 1} more" if len(cells) > 1 else "")
        lines.append(f"| {status} | `{body}` | {rung} | {which} | {error.replace('|', '/')} |")
    return lines


def show_in(page: Path, tables: str) -> None:
    """Puts the tables between the page's marks. Raises `ConfigError` where it has none."""
    page.write_text(shown_in(page.read_text(encoding="utf-8"), tables, page), encoding="utf-8")


def shown_in(text: str, tables: str, page: Path) -> str:
    """The text with the tables between its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError("page", page, f"has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"
