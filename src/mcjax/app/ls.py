"""`mcjax ls [FILTER...]`: the runs of a folder, the newest last: how they stand, what differs, their figures.

A filter is `key=value`, `key!=value`, or a comparison with a number, such as `seed>3` or `ttft_s.p90<2`. A key is a
config key, a group (`sched/prefill`), a figure of the summary, `state`, `key`, `run`, `backend` or `sweep`; its last
part is enough where it is clear. `*` in a value stands for anything. Any other word is looked for everywhere.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from mcjax.errors import McjaxError, RunError
from mcjax.track.find import BASE
from mcjax.track.listing.entries import Entry, entries
from mcjax.track.listing.filters import matching
from mcjax.track.listing.shown import FORMATS, table_of_list, text_of_list

LIMIT = 30


def command(arguments: Sequence[str]) -> int:
    """Exit status 0, also if nothing matches; 2 for a folder or a filter that makes no sense."""
    parser = argparse.ArgumentParser(
        "mcjax ls", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("filters", nargs="*", metavar="FILTER", help="what the runs must be; all must fit")
    parser.add_argument("--all", action="store_true", help=f"all that match, not only the last {LIMIT}")
    parser.add_argument("--limit", type=int, default=LIMIT, metavar="N", help=f"only the last N (default {LIMIT})")
    parser.add_argument("--format", choices=FORMATS, default="table")
    parser.add_argument("--runs", type=Path, default=BASE, metavar="DIR", help=f"the folder of runs (default {BASE})")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_args(arguments)
    try:
        if not options.runs.is_dir():
            raise RunError(f"{options.runs}: no such folder (--runs DIR names another; runs are kept where they ran)")
        gc.disable()  # nothing of what is read is garbage, and looking through it for some takes a third of the time
        found = matching(entries(options.runs), options.filters, options.runs)
    except McjaxError as problem:
        if options.debug:
            raise
        print(f"mcjax: {problem}", file=sys.stderr)
        return 2
    finally:
        gc.freeze()  # nor is it looked through on the way out
        gc.enable()
    listed = found if options.all else found[-max(options.limit, 0) :] if options.limit > 0 else []
    _print(listed, options.format)
    if len(listed) < len(found):
        print(f"{len(found) - len(listed)} more came before these; --all or --limit N lists them", file=sys.stderr)
    elif not found:
        print("no runs match" if options.filters else f"no runs in {options.runs}", file=sys.stderr)
    return 0


def _print(listed: Sequence[Entry], form: str) -> None:
    if form == "table" and sys.stdout.isatty():
        from rich.console import Console

        console = Console()
        console.print(table_of_list(listed, console.width))
    elif listed or form in ("json", "csv"):
        print(text_of_list(listed, form), end="")
