"""`mcjax trace RUN`: a run, or some of its requests, as a file that https://ui.perfetto.dev opens."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mcjax.errors import McjaxError
from mcjax.track.find import find_one
from mcjax.track.perfetto.write import write_trace
from mcjax.track.run import load


def command(arguments: Sequence[str]) -> int:
    """Exit status 0, or 2 for what cannot be written as asked."""
    parser = argparse.ArgumentParser("mcjax trace", description=__doc__)
    parser.add_argument("run", help="a run directory, or what else names one run")
    parser.add_argument(
        "--request",
        type=int,
        nargs="+",
        action="extend",
        default=[],
        metavar="ID",
        help="only what was done for these, and what they shared with others",
    )
    parser.add_argument("--out", metavar="FILE", help="by default NAME.pftrace.gz here; a name in .gz is packed")
    parser.add_argument("--from", type=float, metavar="S", dest="from_s", help="from this second of run time")
    parser.add_argument("--to", type=float, metavar="S", dest="to_s", help="up to this second of run time")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_args(arguments)
    try:
        directory = find_one(options.run)
        out = Path(options.out or _name(directory, options.request))
        written = write_trace(load(directory), out, options.request, options.from_s, options.to_s)
    except McjaxError as problem:
        if options.debug:
            raise
        print(f"mcjax: {problem}", file=sys.stderr)
        return 2
    size = f"{written.stat().st_size / 1e6:.1f} MB"
    print(f"{written} ({size}): open it with https://ui.perfetto.dev, which reads it on this machine")
    return 0


def _name(directory: Path, requests: Sequence[int]) -> str:
    """`2025-11-29_15-32-10-request-7.pftrace.gz`"""
    chosen = f"-request-{'-'.join(map(str, requests))}" if 0 < len(requests) <= 5 else "-requests" if requests else ""
    return f"{directory.resolve().name}{chosen}.pftrace.gz"
