"""Two runs in every detail: what they were told and made of, and where what they did first differs."""

from __future__ import annotations

import difflib
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from mcjax.errors import RunError
from mcjax.track.arrow import Table
from mcjax.track.compare.first import RowDifference, first_row, one_row
from mcjax.track.compare.pairing import OF_THE_MACHINE
from mcjax.track.flat import flat, text_of
from mcjax.track.metrics import CATALOGUE, figures
from mcjax.track.record import StrategySource
from mcjax.track.run import Run
from mcjax.track.schemas import DIGESTED
from mcjax.track.tables import integers

DECIDED = ("time_ns", "request_id", "stage", "choice", "source", "reused_tokens")
"""What was decided: two rows that differ elsewhere (estimates, outcomes) are the same decision."""
NOT_COMPARED = ("argv", "seed", "inputs", "diff", "diff_cut", "untracked")
"""Of the environment: told elsewhere, or in other words."""
OUTPUT_ROWS = 512
ABSENT = "(absent)"


@dataclass(frozen=True, slots=True)
class Change:
    """A value that differs."""

    name: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.name}: {self.first} | {self.second}"


@dataclass(frozen=True, slots=True)
class DecisionDifference:
    """The first decision that differs: its row, and what either run has there (None past its end)."""

    row: int
    first: Mapping[str, Any] | None
    second: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """The first token that differs, of the earliest request that has one. A token is None where that output ended."""

    request_id: int
    position: int
    first: int | None
    second: int | None


@dataclass(frozen=True, slots=True)
class Difference:
    """What `diff` found. `rows` has every table: None where all rows are equal. A text says why there is no answer."""

    names: tuple[str, str]
    equal: bool
    """Every row of every table, by the digests."""
    config: Sequence[Change] = ()
    environment: Sequence[Change] = ()
    inputs: Sequence[Change] = ()
    strategies: Mapping[str, str] = field(default_factory=dict[str, str])
    """By place: the unified diff of the user's own code."""
    decision: DecisionDifference | None = None
    tokens: TokenDifference | str | None = None
    rows: Mapping[str, RowDifference | str | None] = field(default_factory=dict[str, "RowDifference | str | None"])
    figures: Sequence[Change] = ()

    def __str__(self) -> str:
        from mcjax.track.compare.told import told

        return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in told(self))

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.text import Text

        from mcjax.track.compare.told import told

        for title, lines in told(self):
            yield Text(title, style="bold")
            yield from (Text(f"  {line}", style=_style(line)) for line in lines)
            yield Text("")

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def diff(first: Run, second: Run) -> Difference:
    """Compare two runs. Tables are read a piece at a time, as far as they are equal; none if the digests are.

    Raises `RunError` for a damaged `environment.json`.
    """
    records = first.record, second.record
    digests = [str(run.summary.get("digest") or "") for run in (first, second)]
    equal = digests[0] == digests[1] != ""
    rows = {} if equal else {table: _parted(first, second, table) for table in DIGESTED}
    return Difference(
        names=(_name(first), _name(second)),
        equal=equal,
        config=_changes(*({**_choices(record.choices), **record.config} for record in records)),
        environment=_changes(*(_environment(run) for run in (first, second))),
        inputs=_changes(*(record.inputs for record in records)),
        strategies=_strategies(first, second),
        decision=None if equal else _decision(first, second, rows["decisions"]),
        tokens=None if equal else _tokens(first, second),
        rows=rows,
        figures=_figures(first, second),
    )


def _name(run: Run) -> str:
    return str(run.directory or "a run in memory")


def _choices(choices: Mapping[str, str]) -> dict[str, str]:
    """Options of config groups, told from keys by a slash at least."""
    return {name if "/" in name else f"{name}/": option for name, option in choices.items()}


def _changes(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Change]:
    names = dict.fromkeys([*first, *second])
    texts = [(name, *(text_of(side[name]) if name in side else ABSENT for side in (first, second))) for name in names]
    return [Change(name, one, other) for name, one, other in texts if one != other]


def _environment(run: Run) -> dict[str, Any]:
    """Versions, machine, and state of the source tree; the package's own code by its hash."""
    found: dict[str, Any] = {"code": run.record.code[:12] or ABSENT}
    if run.directory is None:
        return found
    try:
        kept = json.loads((run.directory / "environment.json").read_bytes())
        found.update(flat({key: value for key, value in kept.items() if key not in NOT_COMPARED}))
    except (OSError, ValueError, AttributeError) as problem:
        raise RunError(f"{run.directory}: environment.json is damaged ({problem})") from problem
    changed = [line[6:] for line in str(kept.get("diff") or "").splitlines() if line.startswith("+++ b/")]
    found["uncommitted changes"] = ", ".join([*changed, *kept.get("untracked", ())]) or "none"
    return found


def _strategies(first: Run, second: Run) -> dict[str, str]:
    ours, theirs = first.record.strategies, second.record.strategies
    found: dict[str, str] = {}
    for place in dict.fromkeys([*ours, *theirs]):
        one, other = ours.get(place), theirs.get(place)
        if one is None or other is None or one.sha256 != other.sha256:
            found[place] = _source_diff((first, one), (second, other))
        elif one.name != other.name:
            found[place] = f"the same code as {one.name} | {other.name}"
    return found


def _source_diff(*sides: tuple[Run, StrategySource | None]) -> str:
    """The unified diff of the files that were kept, by their names."""
    kept = [{Path(name).name: _lines(run, name) for name in source.files} if source else {} for run, source in sides]
    names = [source.name if source else ABSENT for _, source in sides]
    lines = [f"{names[0]} | {names[1]}"]
    for name in dict.fromkeys([*kept[0], *kept[1]]):
        texts = [side.get(name, []) for side in kept]
        lines += difflib.unified_diff(texts[0], texts[1], f"first/{name}", f"second/{name}", lineterm="")
    if len(lines) == 1 and not any(kept):
        lines.append("its source was not kept")
    return "\n".join(lines)


def _lines(run: Run, name: str) -> list[str]:
    path = (run.directory or Path()) / name
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def _parted(first: Run, second: Run, table: str) -> RowDifference | str | None:
    """Where a table parts; or why that cannot be said, of a table that is damaged or was not kept."""
    try:
        return first_row(first, second, table)
    except RunError as problem:
        return str(problem)


def _decision(first: Run, second: Run, row: RowDifference | str | None) -> DecisionDifference | None:
    if not isinstance(row, RowDifference):
        return None
    parted = first_row(first, second, "decisions", DECIDED)
    if parted is None:
        return None
    return DecisionDifference(parted.row, *(one_row(run, "decisions", parted.row) for run in (first, second)))


def _tokens(first: Run, second: Run) -> TokenDifference | str | None:
    """The earliest request, by arrival in the first run, whose output differs, among those that both runs kept."""
    try:
        tables = [run.columns("requests", "request_id", "arrival_ns", "output") for run in (first, second)]
    except RunError as problem:
        return str(problem)
    if any(not len(table.column("output").combine_chunks().flatten()) for table in tables):
        return "outputs were not kept (a virtual run whose requests have no tokens)"
    ids = [integers(table, "request_id") for table in tables]
    common, ours, theirs = np.intersect1d(ids[0], ids[1], return_indices=True)
    if not len(common):
        return "no request is in both"
    order = np.argsort(integers(tables[0], "arrival_ns")[ours], kind="stable")
    for start in range(0, len(order), OUTPUT_ROWS):
        some = order[start : start + OUTPUT_ROWS]
        outputs = [_outputs(table, at[some]) for table, at in ((tables[0], ours), (tables[1], theirs))]
        for request_id, one, other in zip(common[some].tolist(), *outputs, strict=True):
            if one != other:
                at = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
                at = min(len(one), len(other)) if at is None else at
                return TokenDifference(request_id, at, *(side[at] if at < len(side) else None for side in (one, other)))
    return None


def _outputs(table: Table, rows: Any) -> list[list[int]]:
    return cast("list[list[int]]", table.column("output").take(rows).to_pylist())


def _figures(first: Run, second: Run) -> list[Change]:
    """But for those that two equal runs differ in: how long the machine took, and what memory."""
    ours, theirs = (
        {name: value for name, value in figures(run.summary).items() if name not in OF_THE_MACHINE}
        for run in (first, second)
    )
    known = [name for name in CATALOGUE if name in ours or name in theirs]
    names = dict.fromkeys([*known, *ours, *theirs])
    return _changes(*({name: side[name] for name in names if name in side} for side in (ours, theirs)))


def _style(line: str) -> str:
    """Of a unified diff."""
    return "green" if line.startswith("+") else "red" if line.startswith("-") else ""
