"""`mcjax compare RUNS...|SWEEP`: groups of runs side by side, with intervals of their differences.

Runs that differ only in seed and slice are one group. Differences are to the first group; `*` marks the best where
its difference to every other group is certain. RUN is a directory, a name below `runs`, the first digits of a key, a
pattern or a sweep.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mcjax.errors import ConfigError, McjaxError
from mcjax.track.compare.bootstrap import RESAMPLES
from mcjax.track.compare.comparison import Comparison, compare, missing_of
from mcjax.track.compare.render import FORMATS
from mcjax.track.compare.view import sentences
from mcjax.track.find import find
from mcjax.track.runs import Runs, load_all


def command(arguments: Sequence[str]) -> int:
    """Exit status 0, or 2 if there is nothing to compare, or nothing that was asked for."""
    options = _parser().parse_args(arguments)
    try:
        metrics = [name for words in options.metric for name in words.split(",") if name]
        comparison = compare(
            runs_of(options.runs),
            metrics or None,
            options.by,
            baseline=options.baseline,
            partial=options.partial,
            resamples=options.resamples,
            seed=options.seed,
        )
        _show(comparison, options.format, options.out)
    except McjaxError as problem:
        if options.debug:
            raise
        print(f"mcjax: {problem}", file=sys.stderr)
        return 2
    return 0


def runs_of(references: Sequence[str]) -> Runs:
    """What `references` name; points of a sweep that have no run are among the refused."""
    found = find(references)
    runs = load_all(found.directories)
    missing = [one for sweep in found.sweeps for one in missing_of(sweep)]
    return Runs(list(runs), [*runs.refused, *missing])


def _show(comparison: Comparison, format: str, out: str | None) -> None:
    """Print or write it. Raises `ConfigError` for a file that cannot be written."""
    if out is None and format == "table" and sys.stdout.isatty():
        from rich.console import Console

        Console().print(comparison)
        return
    text = comparison.render(format)
    if format == "csv":  # a table has no room for them
        for line in sentences(comparison):
            print(line, file=sys.stderr)
    if out is None:
        print(text, end="")
        return
    try:
        Path(out).write_text(text, encoding="utf-8")
    except OSError as problem:
        raise ConfigError("--out", out, f"cannot be written: {problem}") from problem


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("mcjax compare", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="runs, patterns of runs, or sweeps")
    parser.add_argument("--format", choices=FORMATS, default="table", help="default: table")
    parser.add_argument(
        "--metric", action="append", default=[], metavar="NAME", help="a figure of summary.json (ttft_s.p90), or ttft_s"
    )
    parser.add_argument("--by", metavar="COLUMN", help="figures for each value of a column of requests, such as tenant")
    parser.add_argument("--baseline", default="1", metavar="GROUP", help="by number or label; default: the first")
    parser.add_argument("--partial", action="store_true", help="take in runs that ended early but kept their tables")
    parser.add_argument("--out", metavar="FILE", help="write there instead of printing")
    parser.add_argument("--resamples", type=int, default=RESAMPLES, metavar="N", help=f"default: {RESAMPLES}")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the resampling; default: 0")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser
