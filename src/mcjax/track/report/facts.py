"""What a report says of its runs in words and numbers: how they were made, how they differ, which are missing."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mcjax.track.flat import text_of
from mcjax.track.groups import IGNORED, PAIRED, Group
from mcjax.track.metrics import CATALOGUE, Metric
from mcjax.track.run import Run
from mcjax.track.runs import Runs

COLUMNS = ("goodput_rps", "slo_attainment", "ttft_s.p90", "tbt_s.p90", "prefix_hit_rate.token")
LOST = ("requests.rejected", "requests.failed")
SHOWN_DIGITS = 12


@dataclass(frozen=True, slots=True)
class RunLine:
    """One run in the list of runs. `link` and `picture` are relative to the page, or empty."""

    group: str
    seed: int
    slice: int
    name: str
    link: str
    picture: str
    key: str
    figures: Sequence[str] = field(default_factory=list[str])


def question_of(runs: Runs) -> str:
    """What the study is to answer, if somebody said so."""
    told = [runs.sweep.question] if runs.sweep else []
    told += [str(run.config.get("question") or "") for run in runs]
    return next((question for question in told if question), "")


def how_made(runs: Runs) -> list[tuple[str, list[str]]]:
    """Commands, times, code, versions, machine and inputs, each once."""
    environments = [_environment(run) for run in runs]
    records = [run.record for run in runs]
    commands = [runs.sweep.argv] if runs.sweep and runs.sweep.argv else [record.argv for record in records]
    started = [runs.sweep.started] if runs.sweep else [record.started for record in records]
    ended = [runs.sweep.ended] if runs.sweep else [record.ended for record in records]
    found = [
        ("command", _once(shlex.join(argv) for argv in commands if argv)),
        ("started", _ends(started, first=True)),
        ("ended", _ends(ended, first=False)),
        ("backend", _once(record.backend for record in records)),
        ("mcjax", _once(each.get("packages", {}).get("mcjax", "") for each in environments)),
        ("code", _once(record.code[:SHOWN_DIGITS] for record in records)),
        ("git revision", _once(_revision(each) for each in environments)),
        ("Python", _once(each.get("python", "") for each in environments)),
        ("machine", _once(_machine(each) for each in environments)),
        ("devices", _once(", ".join(map(str, each.get("devices") or [])) for each in environments)),
        ("inputs", _once(line for each in environments for line in _inputs(each))),
        (
            "own code",
            _once(
                f"{place}: {source.name} ({source.sha256[:SHOWN_DIGITS]})"
                for record in records
                for place, source in record.strategies.items()
            ),
        ),
    ]
    return [(name, lines) for name, lines in found if lines]


def common_config(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """The keys that every run has in common, in the order of the config."""
    configs = [run.record.config for group in groups for run in group.runs.values()]
    differing = {key for group in groups for key in group.values}
    found: list[tuple[str, str]] = []
    for key, value in configs[0].items():
        if key in PAIRED or key in differing or key.startswith(IGNORED):
            continue
        if all(key in config and config[key] == value for config in configs):
            found.append((key, text_of(value)))
    return found


def run_lines(groups: Sequence[Group], page: Path) -> list[RunLine]:
    """A line a run, with links that hold as long as page and runs keep their places to one another."""
    lines: list[RunLine] = []
    for group in groups:
        for (seed, slice_), run in group.runs.items():
            link, picture, name = "", "", "in memory"
            if run.directory is not None:
                name = run.directory.name
                relative = os.path.relpath(run.directory, page.parent)
                link = quote(f"{Path(relative).as_posix()}/")
                picture = f"{link}overview.png" if (run.directory / "overview.png").exists() else ""
            figures = [text_with_unit(CATALOGUE[column], CATALOGUE[column].of(run.summary)) for column in COLUMNS]
            lost = sum(CATALOGUE[name].of(run.summary) or 0 for name in LOST)
            key = run.record.run_key[:SHOWN_DIGITS]
            figures = [f"{lost:,.0f}", *figures]
            lines.append(RunLine(group.label, seed, slice_, name, link, picture, key, figures))
    return lines


def run_columns() -> list[str]:
    """The heads of the figures of `run_lines`."""
    return ["rejected, failed", *(CATALOGUE[name].label for name in COLUMNS)]


def left_out(runs: Runs) -> list[tuple[str, str]]:
    """What should be there and is not: runs that cannot be read or ended early, points of the sweep without a run."""
    found = [(Path(name).name, reason) for name, reason in runs.refused]
    found += [
        (run.directory.name if run.directory else "a run in memory", f"ended early: {run.reason or run.state}")
        for run in runs
        if run.state != "done"
    ]
    if runs.sweep:
        for point in runs.sweep.missing():
            reason = f"{point.state}: {point.reason}" if point.reason else point.state
            found.append((" ".join(point.overrides), reason))
    return found


def text_with_unit(metric: Metric, value: float | None) -> str:
    """`36.2 s`, `31.1 ms`, `17.8 %`, `0.528 /s`; a dash for none."""
    if value is None:
        return "–"  # noqa: RUF001
    if metric.unit == "s":
        return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
    if metric.unit == "share":
        return f"{100 * value:.1f} %"
    return f"{value:.3g} /s" if metric.unit == "1/s" else f"{value:,.4g}"


def _environment(run: Run) -> Mapping[str, Any]:
    if run.directory is None:
        return {}
    try:
        return json.loads((run.directory / "environment.json").read_bytes())
    except (OSError, ValueError):
        return {}


def _revision(environment: Mapping[str, Any]) -> str:
    revision = environment.get("revision") or ""
    changed = " with changes that are not committed" if environment.get("diff") else ""
    return f"{revision[:SHOWN_DIGITS]}{changed}" if revision else ""


def _machine(environment: Mapping[str, Any]) -> str:
    if not environment:
        return ""
    return f"{environment.get('platform', '')}, {environment.get('processor_count', '?')} processors"


def _inputs(environment: Mapping[str, Any]) -> list[str]:
    inputs: Mapping[str, str] = environment.get("inputs") or {}
    return [f"{Path(path).name}, sha256 {sha[:SHOWN_DIGITS]}…" for path, sha in inputs.items()]


def _once(texts: Any) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text]


def _ends(times: Sequence[str], first: bool) -> list[str]:
    known = sorted(time for time in times if time)
    return [known[0 if first else -1]] if known else []
