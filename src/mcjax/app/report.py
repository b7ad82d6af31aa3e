"""`mcjax report SWEEP|RUNS...`: one HTML page with the question, tables, figures and links to the runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mcjax.app.plot import kinds_of, runs_of
from mcjax.errors import McjaxError
from mcjax.track.plots.kinds import KINDS
from mcjax.track.report.page import report


def command(arguments: Sequence[str]) -> int:
    """Exit status 0, or 2 for runs that cannot be reported."""
    parser = argparse.ArgumentParser("mcjax report", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="SWEEP|RUN", help="directories, names, keys, patterns")
    parser.add_argument("--out", metavar="FILE", help="the page (default: report.html, of a sweep in its directory)")
    parser.add_argument("--kinds", metavar="A,B", help=f"which figures (default: {','.join(KINDS)})")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_args(arguments)
    try:
        kinds = kinds_of(options.kinds) if options.kinds else list(KINDS)
        runs = runs_of(options.runs)
        path = Path(options.out) if options.out else (runs.sweep.directory if runs.sweep else Path()) / "report.html"
        print(report(runs, path, kinds))
    except McjaxError as problem:
        if options.debug:
            raise
        print(f"mcjax: {problem}", file=sys.stderr)
        return 2
    return 0
