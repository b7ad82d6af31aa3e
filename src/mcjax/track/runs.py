"""Several runs together: what differs between them, their figures side by side."""

from __future__ import annotations

import html
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from mcjax.errors import RunError
from mcjax.track.find import BASE, find
from mcjax.track.groups import Group, groups_of
from mcjax.track.metrics import HEADLINE, metric
from mcjax.track.run import Run
from mcjax.track.run import load as load_one
from mcjax.track.sweep import Sweep

if TYPE_CHECKING:
    from mcjax.track.compare.comparison import Comparison
    from mcjax.track.plots.drawn import Drawn


class Runs(Sequence[Run]):
    """Runs in order. `refused` names those that could not be read, and why; `sweep` is where they come from."""

    def __init__(
        self, runs: Sequence[Run], refused: Sequence[tuple[str, str]] = (), sweep: Sweep | None = None
    ) -> None:
        self._runs = list(runs)
        self.refused = list(refused)
        self.sweep = sweep

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> Runs: ...
    def __getitem__(self, index: int | slice) -> Run | Runs:
        return Runs(self._runs[index]) if isinstance(index, slice) else self._runs[index]

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    def groups(self) -> list[Group]:
        """The runs by config, seeds and slices apart."""
        return groups_of(self._runs)

    @property
    def summary(self) -> Any:
        """A `pandas.DataFrame`: a row a run, the config keys that differ, seed and slice, and the headline figures."""
        pandas = importlib.import_module("pandas")
        rows: list[dict[str, Any]] = []
        for group in self.groups():
            for (seed, slice_), run in group.runs.items():
                figures = {name: metric(name).of(run.summary) for name in HEADLINE}
                rows.append({**group.values, "seed": seed, "slice": slice_, **figures})
        return pandas.DataFrame(rows)

    def plot(self, kind: str, **options: object) -> Drawn:
        """A picture of all groups (`mcjax.track.plots.kinds.KINDS` names them), with intervals over repetitions.

        Raises `ConfigError` for an unknown kind or option, `RunError` for runs that did not keep what it needs.
        """
        from mcjax.track.plots.kinds import draw

        return draw(self, kind, **options)

    def compare(self, metrics: Sequence[str] | None = None, by: str | None = None) -> Comparison:
        """The groups side by side, each figure with the interval of its difference to the first group's.

        Raises `RunError` where nothing is left to compare, `ConfigError` for an unknown metric.
        """
        from mcjax.track.compare.comparison import compare

        return compare(self, metrics, by)

    def report(self, path: str | Path) -> Path:
        """One self-contained HTML page of all runs. Returns where it lies."""
        from mcjax.track.report.page import report

        return report(self, path)

    def _repr_html_(self) -> str:
        table = self.summary.to_html(index=False, float_format="{:.4g}".format) if len(self) else ""
        refused = "".join(f"<li>{html.escape(f'{name}: {reason}')}</li>" for name, reason in self.refused)
        return f"<p><code>{html.escape(repr(self))}</code></p>{table}<ul>{refused}</ul>"

    def __repr__(self) -> str:
        name = f"{self.sweep.name}, " if self.sweep else ""
        refused = f", {len(self.refused)} refused" if self.refused else ""
        return f"Runs({name}{len(self)} runs in {len(self.groups())} groups{refused})"


@overload
def load(reference: str | Path) -> Any: ...  # a Run or Runs: what the words name is not known before they are read
@overload
def load(reference: Sequence[str | Path]) -> Runs: ...
def load(reference: str | Path | Sequence[str | Path]) -> Run | Runs:
    """A run by its directory (or its name below `runs`, or the first digits of its key); several, as `Runs`, by a
    pattern (`runs/2026-*`), a list, or a sweep.

    Raises `RunError`, naming the directory, for one that is no run, still RUNNING (or killed), damaged, or of a later
    version; of several, those are left out and stand in `refused`.
    """
    if isinstance(reference, str | Path):
        if Path(reference).is_dir() and not (Path(reference) / "sweep.json").exists():
            return load_one(reference)
        found = find([reference], BASE)
        if len(found.directories) == 1 and not found.sweeps and not _is_pattern(str(reference)):
            return load_one(found.directories[0])
    else:
        found = find(list(reference), BASE)
    return load_all(found.directories, found.sweeps[0] if len(found.sweeps) == 1 else None)


def load_all(directories: Sequence[Path], sweep: Sweep | None = None) -> Runs:
    """The runs that can be read, and why the others cannot."""
    runs: list[Run] = []
    refused: list[tuple[str, str]] = []
    for directory in directories:
        try:
            runs.append(load_one(directory))
        except RunError as problem:
            refused.append((str(directory), str(problem)))
    return Runs(runs, refused, sweep)


def _is_pattern(reference: str) -> bool:
    return any(sign in reference for sign in "*?[")
