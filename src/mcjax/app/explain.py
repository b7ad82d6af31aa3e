"""`mcjax explain RUN REQUEST`: a request's timeline and, for each of its decisions, what was chosen among what."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from mcjax.errors import ConfigError, McjaxError
from mcjax.track.find import find_one
from mcjax.track.run import load


def command(arguments: Sequence[str]) -> int:
    """Exit status 0, or 2 for a run or a request that cannot be explained."""
    parser = argparse.ArgumentParser("mcjax explain", description=__doc__)
    parser.add_argument("run", help="a run: its directory, its name below runs/, or the first digits of its key")
    parser.add_argument("request", type=int, help="a request_id of its requests.parquet")
    parser.add_argument("--plot", metavar="FILE", help="draw the timeline too, as .png, .svg or .pdf")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_args(arguments)
    try:
        story = load(find_one(options.run)).request(options.request)
        if options.plot:
            _draw(story.plot(), options.plot)
    except McjaxError as problem:
        if options.debug:
            raise
        print(f"mcjax: {problem}", file=sys.stderr)
        return 2
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(story)
    else:
        print(story)
    return 0


def _draw(figure: Any, path: str) -> None:
    """Raises `ConfigError` for a file that cannot be written."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as problem:
        raise ConfigError("--plot", path, f"cannot be written: {problem}") from problem
