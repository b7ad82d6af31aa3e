"""Groups of runs side by side: what differs, by how much, and what of it can be believed.

`docs/compare.md` says how each figure comes about.
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcjax.errors import ConfigError, RunError
from mcjax.track.compare.bootstrap import ERROR, RESAMPLES
from mcjax.track.compare.difference import Difference, Differences
from mcjax.track.compare.notes import notes_of
from mcjax.track.compare.weighted import of_requests, values_of
from mcjax.track.groups import Group, groups_of
from mcjax.track.metrics import BESIDE_GOODPUT, CATALOGUE, HEADLINE, Metric, figures
from mcjax.track.run import Run
from mcjax.track.runs import Runs
from mcjax.track.schemas import SCHEMAS
from mcjax.track.sweep import Sweep


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure of one group: its mean over the group's runs, and its difference to the baseline."""

    mean: float | None
    difference: Difference | None = None
    best: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A metric, of all requests or of those of one `part` (a tenant); a cell a group."""

    metric: Metric
    part: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found. `same` are the figures that no group differs in; `notes` say what limits the rest."""

    groups: Sequence[Group]
    baseline: int
    rows: Sequence[Row]
    same: Sequence[Row]
    notes: Sequence[str]
    refused: Sequence[tuple[str, str]]
    by: str = ""
    error: float = ERROR
    config: Sequence[str] = field(default_factory=list[str])
    """The config keys that the groups differ in."""

    def records(self) -> list[dict[str, Any]]:
        """A record for each metric and group, tidy: `mean`, `difference`, `low`, `high`, `count`, `way`, `best`."""
        found: list[dict[str, Any]] = []
        for row in (*self.rows, *self.same):
            for group, cell in zip(self.groups, row.cells, strict=True):
                away = cell.difference
                interval = away.interval if away else None
                found.append(
                    {
                        "group": group.label,
                        **{key: group.values.get(key) for key in self.config},
                        **({self.by: row.part} if self.by else {}),
                        "metric": row.metric.name,
                        "unit": row.metric.unit,
                        "runs": len(group.runs),
                        "mean": cell.mean,
                        "difference": away.value if away else None,
                        "low": interval.low if interval else None,
                        "high": interval.high if interval else None,
                        "count": away.count if away else None,
                        "way": away.way if away else None,
                        "best": cell.best,
                    }
                )
        return found

    @property
    def frame(self) -> Any:
        """`records` as a `pandas.DataFrame`."""
        return importlib.import_module("pandas").DataFrame(self.records())

    def render(self, format: str = "table", width: int = 100) -> str:
        """As text: `table` (for a terminal of so many columns), `md`, `csv` or `latex`. Raises `ConfigError`."""
        from mcjax.track.compare.render import render

        return render(self, format, width)

    def __str__(self) -> str:
        return self.render()

    def __repr__(self) -> str:
        return f"Comparison({len(self.groups)} groups, {len(self.rows)} figures differ, {len(self.refused)} refused)"

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from mcjax.track.compare.terminal import parts

        return parts(self, options.max_width)

    def _repr_html_(self) -> str:
        from mcjax.track.compare.render import html_of

        return html_of(self)


def compare(
    runs: Runs | Sequence[Run],
    metrics: Sequence[str] | None = None,
    by: str | None = None,
    *,
    baseline: str | int = 1,
    partial: bool = False,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """Compare groups of runs: equal config but for seed and slice is one group.

    Args:
        runs: as `mcjax.load` gives them.
        metrics: names of `summary.json` (`ttft_s.p90`, or `ttft_s` for all of it); by default the headline figures
            that differ. Those named are shown even if they do not.
        by: a column of `requests.parquet` with few values, such as `tenant`: the figures for each of them.
        baseline: the group that the others are compared to, by its number from 1, or its label.
        partial: take in runs that ended early but kept their tables.
        resamples: of each bootstrap.
        seed: of the resampling.

    Raises:
        RunError: no run is left.
        ConfigError: an unknown metric, column or group.
    """
    kept, refused = _kept(runs, partial)
    if not kept:
        reasons = "".join(f"\n  {what}: {why}" for what, why in refused)
        raise RunError(f"there is no run to compare{reasons}")
    if resamples < 100:
        raise ConfigError("resamples", resamples, "too few for an interval", ["100 and more"])
    groups = groups_of(kept)
    first = _baseline(baseline, groups)
    differences = Differences(groups, by or "", resamples, seed)
    wanted, told = _metrics(metrics, kept, by)
    rows: list[Row] = []
    same: list[Row] = []
    for part in _parts(kept, by):
        own = [_row(groups, first, metric, part, differences) for metric in wanted]
        own = [row for row in own if any(cell.mean is not None for cell in row.cells)]
        differing = {row.metric.name for row in own if told or _differs(row) or len(groups) == 1}
        if "goodput_rps" in differing:
            differing.update(BESIDE_GOODPUT)
        rows += [row for row in own if row.metric.name in differing]
        same += [row for row in own if row.metric.name not in differing]
    notes = notes_of(groups, first, differences, rows)
    keys = list(dict.fromkeys(key for group in groups for key in group.values))
    return Comparison(groups, first, rows, same, notes, refused, by or "", ERROR, keys)


def missing_of(sweep: Sweep) -> list[tuple[str, str]]:
    """The points of a sweep that have no run to compare, and why."""
    points = sweep.missing()
    return [(" ".join(point.overrides), f"{point.state} in {sweep.name} {point.reason}".rstrip()) for point in points]


def _kept(runs: Runs | Sequence[Run], partial: bool) -> tuple[list[Run], list[tuple[str, str]]]:
    kept: list[Run] = []
    refused: list[tuple[str, str]] = []
    if isinstance(runs, Runs):
        refused += runs.refused
        refused += missing_of(runs.sweep) if runs.sweep else []
    for run in runs:
        if run.state == "done" or partial:
            kept.append(run)
        else:
            refused.append((str(run.directory or "a run in memory"), f"{run.state}: {run.reason} (--partial takes it)"))
    return kept, refused


def _baseline(wanted: str | int, groups: Sequence[Group]) -> int:
    """The index of a group. Raises `ConfigError`."""
    word = str(wanted)
    if word.isdecimal() and 1 <= int(word) <= len(groups):
        return int(word) - 1
    named = [index for index, group in enumerate(groups) if group.label == word or word in group.values.values()]
    if len(named) != 1:
        allowed = [f"{number} ({group.label})" for number, group in enumerate(groups, 1)]
        raise ConfigError("baseline", wanted, f"names {len(named)} groups", allowed)
    return named[0]


def _metrics(names: Sequence[str] | None, runs: Sequence[Run], by: str | None) -> tuple[list[Metric], bool]:
    """What to compare, and whether that was told. Raises `ConfigError` for a name that no summary has."""
    known = {name for run in runs for name in figures(run.summary)}
    told = list(names or ())
    found: list[str] = []
    for name in told or [name for name in HEADLINE if name in known]:
        of_group = [one for one in CATALOGUE if one in known and one.startswith(f"{name}.")]
        of_group = of_group or sorted(one for one in known if one.startswith(f"{name}."))
        if name not in known and name not in CATALOGUE and not of_group:
            words = sorted({word for one in known for word in (one, one.split(".")[0])})
            close = difflib.get_close_matches(name, words, 4)
            hint = f", did you mean {', '.join(close)}" if close else ""
            raise ConfigError("metric", name, f"summary.json has no such figure{hint}")
        found += of_group or [name]
    if "goodput_rps" in found:
        found = [name for name in found if name not in BESIDE_GOODPUT]
        at = found.index("goodput_rps") + 1
        found[at:at] = BESIDE_GOODPUT
    if by:
        strange = next((name for name in found if not of_requests(name)), "")
        if strange and told:
            raise ConfigError("metric", strange, f"cannot be told apart by {by}: it is no figure of requests")
        found = [name for name in found if of_requests(name)]
    metrics = [CATALOGUE.get(name, Metric(name, name, "", "")) for name in dict.fromkeys(found)]
    return metrics, bool(told)


def _parts(runs: Sequence[Run], by: str | None) -> list[str]:
    """The values of the column `by`. Raises `ConfigError` for a column that is no text."""
    if not by:
        return [""]
    texts = [name for name, kind in SCHEMAS["requests"] if kind == "text"]
    if by not in texts:
        raise ConfigError("by", by, "no column of requests.parquet that holds words", texts)
    return values_of(runs, by)


def _row(groups: Sequence[Group], first: int, metric: Metric, part: str, differences: Differences) -> Row:
    means = [_mean(differences.value(run, metric, part) for run in group.runs.values()) for group in groups]
    best = _best(metric, means, part, differences)
    cells: list[Cell] = []
    for index, mean in enumerate(means):
        away = None
        if index != first and mean is not None and means[first] is not None:
            away = differences.between(first, index, metric, part, ERROR)
        cells.append(Cell(mean, away, index == best))
    return Row(metric, part, tuple(cells))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _differs(row: Row) -> bool:
    return len({cell.mean for cell in row.cells}) > 1


def _best(metric: Metric, means: Sequence[float | None], part: str, differences: Differences) -> int:
    """The group that lies apart from every other on the good side, or -1.

    Its intervals against the m others each miss with at most ERROR / m (Bonferroni).
    """
    known = [index for index, mean in enumerate(means) if mean is not None]
    if metric.better == "" or len(known) < 2:
        return -1
    sign = 1 if metric.better == "higher" else -1
    best = max(known, key=lambda index: sign * (means[index] or 0.0))
    error = ERROR / (len(known) - 1)
    for other in known:
        if other == best:
            continue
        away = differences.between(other, best, metric, part, error)
        if away is None or away.interval is None or not away.enough:
            return -1
        if not away.interval.excludes_zero or sign * away.value <= 0:
            return -1
    return best
