"""`report`: question, how it was run, what differs, tables, figures with notes, and what is missing, on one page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from mcjax.errors import ConfigError, RunError
from mcjax.track.compare.comparison import compare
from mcjax.track.plots.kinds import KINDS, draw
from mcjax.track.report.facts import common_config, how_made, left_out, question_of, run_columns, run_lines
from mcjax.track.report.inline import inline
from mcjax.track.run import Run
from mcjax.track.runs import Runs, load_all
from mcjax.track.sweep import Sweep

TEMPLATE = "page.html.j2"


def report(sweep_or_runs: Sweep | Runs | Run, path: str | Path, kinds: Sequence[str] = tuple(KINDS)) -> Path:
    """Write the page. It needs no network and no other file; its links to the runs are relative to where it lies.

    Equal runs give an equal page. A figure that the runs did not keep enough for is named with its reason.

    Raises:
        RunError: there is no finished run.
        ConfigError: an unknown kind, or the page cannot be written.
    """
    target = Path(path)
    runs = _runs(sweep_or_runs)
    done = [run for run in runs if run.state == "done"]
    if not done:
        raise RunError("; ".join(["there is no finished run to report", *(why for _, why in left_out(runs)[:3])]))
    page = _render(_content(Runs(done, runs.refused, runs.sweep), runs, target, kinds))
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, target)
    except OSError as problem:
        raise ConfigError("out", path, f"cannot be written: {problem.strerror or problem}") from problem
    return target


def _runs(given: Sweep | Runs | Run) -> Runs:
    if isinstance(given, Sweep):
        return load_all(given.runs(), given)
    return Runs([given]) if isinstance(given, Run) else given


def _content(done: Runs, every: Runs, target: Path, kinds: Sequence[str]) -> dict[str, Any]:
    groups = done.groups()
    keys = list(dict.fromkeys(key for group in groups for key in group.values))
    figures, not_drawn = _figures(done, kinds)
    question = question_of(done)
    name = done.sweep.name if done.sweep else ""
    return {
        "title": question or _title(len(done), keys),
        "asked": bool(question),
        "sweep": name,
        "counts": _counts(len(groups), len(done), len(left_out(every))),
        "keys": keys,
        "groups": [(group.label, [group.values.get(key, "") for key in keys], len(group.runs)) for group in groups],
        "common": common_config(groups),
        "comparison": _comparison(done),
        "figures": figures,
        "not_drawn": not_drawn,
        "columns": run_columns(),
        "runs": run_lines(groups, target.absolute()),
        "left_out": left_out(every),
        "how": how_made(done),
    }


def _title(runs: int, keys: Sequence[str]) -> str:
    count = "One run" if runs == 1 else f"{runs:,} runs"
    return f"{count} by {', '.join(keys)}" if keys else count


def _figures(runs: Runs, kinds: Sequence[str]) -> tuple[list[dict[str, str]], list[tuple[str, str]]]:
    figures: list[dict[str, str]] = []
    not_drawn: list[tuple[str, str]] = []
    for kind in kinds:
        try:
            drawn = draw(runs, kind)
        except RunError as problem:
            not_drawn.append((KINDS[kind].title, str(problem)))
            continue
        command = f"mcjax plot {runs.sweep.name if runs.sweep else 'RUNS'} kind={kind} out={kind}.pdf"
        picture = inline(drawn, kind)
        figures.append({"kind": kind, "title": drawn.title, "note": drawn.note, "command": command, "picture": picture})
    return figures, not_drawn


def _comparison(runs: Runs) -> str:
    return compare(runs)._repr_html_()  # pyright: ignore[reportPrivateUsage]


def _counts(groups: int, runs: int, left_out: int) -> list[tuple[str, str]]:
    found = [("groups", f"{groups:,}"), ("runs", f"{runs:,}")]
    return [*found, ("left out", f"{left_out:,}")] if left_out else found


def _render(content: dict[str, Any]) -> str:
    from jinja2 import Environment, StrictUndefined

    source = resources.files("mcjax.track.report").joinpath(TEMPLATE).read_text(encoding="utf-8")
    # Labels, config values and reasons are anybody's text: all of it is escaped.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source).render(content) + "\n"
