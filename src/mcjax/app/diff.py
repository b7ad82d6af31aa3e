"""`mcjax diff RUN RUN`: config, environment and own code that differ, and the first differing decision and token."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mcjax.errors import McjaxError
from mcjax.track.compare.diff import diff
from mcjax.track.find import find_one
from mcjax.track.run import load


def command(arguments: Sequence[str]) -> int:
    """Exit status 0, whether they differ or not, and 2 for a run that cannot be read."""
    parser = argparse.ArgumentParser("mcjax diff", description=__doc__)
    parser.add_argument("first", help="a run directory, its name below `runs`, or the first digits of its key")
    parser.add_argument("second", help="another one")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_args(arguments)
    try:
        found = diff(*(load(find_one(name)) for name in (options.first, options.second)))
    except McjaxError as problem:
        if options.debug:
            raise
        print(f"mcjax: {problem}", file=sys.stderr)
        return 2
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(found)
    else:
        print(found)
    return 0
