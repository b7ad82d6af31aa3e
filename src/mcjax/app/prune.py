"""`mcjax prune`: remove run directories, or only their tables, by state, age, number, size, or for a newer one.

It lists what would go; only with --yes it goes. All conditions that are given must hold. What is running stays, and so
do runs of sweeps (unless --sweeps), links, and directories that are no runs.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from mcjax.errors import ConfigError, McjaxError, RunError
from mcjax.track.find import BASE
from mcjax.track.prune import STATES, Entry, Rules, chosen, entries, remove, remove_tables, sweep_up

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def command(arguments: Sequence[str]) -> int:
    """Exit status 0; 1 if something that should go stayed; 2 for what makes no sense."""
    parser = argparse.ArgumentParser(
        "mcjax prune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state", metavar="STATE,...", help=f"only runs that are {', '.join(STATES)}")
    parser.add_argument("--older-than", metavar="AGE", help="only runs that ended longer ago: 30d, 12h, 2w")
    parser.add_argument("--superseded", action="store_true", help="only runs that a newer one of the same key replaces")
    parser.add_argument("--keep", type=int, metavar="N", help="of those that fit, keep the newest N")
    parser.add_argument("--budget", metavar="SIZE", help="only as many, oldest first, as bring all runs below 10GB")
    parser.add_argument("--sweeps", action="store_true", help="runs of sweeps too")
    parser.add_argument("--tables", action="store_true", help="only the tables go: figures, config and pictures stay")
    parser.add_argument("--runs", type=Path, default=BASE, metavar="DIR", help=f"the folder of runs (default {BASE})")
    parser.add_argument("--yes", action="store_true", help="remove them; without it they are only listed")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_args(arguments)
    try:
        rules = _rules(options)
        if not options.runs.is_dir():
            raise RunError(f"{options.runs}: no such folder (--runs DIR names another)")
        found = entries(options.runs)
        going = chosen(found, rules, time.time())
        return _prune(found, going, rules, options.runs) if options.yes else _list(found, going, rules)
    except McjaxError as problem:
        if options.debug:
            raise
        print(f"mcjax: {problem}", file=sys.stderr)
        return 2


def _rules(options: argparse.Namespace) -> Rules:
    """Raises `ConfigError` for what cannot be read, and where nothing says what may go."""
    asked = (options.state, options.older_than, options.superseded or None, options.keep, options.budget)
    if all(each is None for each in asked):
        problem = "says nothing of which runs may go; give --state, --older-than, --superseded, --keep or --budget"
        raise ConfigError("prune", "", problem)
    states = options.state.split(",") if options.state else STATES
    for state in states:
        if state not in STATES:
            raise ConfigError("--state", state, "no such state, or one whose runs stay", STATES)
    if options.keep is not None and options.keep < 0:
        raise ConfigError("--keep", options.keep, "must be 0 or more")
    return Rules(
        states=states,
        older_than_s=_measured("--older-than", options.older_than, SECONDS) or 0.0,
        superseded=options.superseded,
        keep=options.keep or 0,
        budget_bytes=_measured("--budget", options.budget, BYTES),
        sweeps=options.sweeps,
        tables=options.tables,
    )


def _measured(option: str, text: str | None, units: dict[str, int]) -> float | None:
    """`30d` in seconds, or `10GB` in bytes."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text)
    if match is None or match[2] not in units:
        raise ConfigError(option, text, "must be a number and a unit", units)
    return float(match[1]) * units[match[2]]


def _list(found: Sequence[Entry], going: Sequence[Entry], rules: Rules) -> int:
    for entry in going:
        ended = datetime.fromtimestamp(entry.ended_s).strftime("%Y-%m-%d %H:%M")
        why = f"  superseded by {entry.superseded_by}" if entry.superseded_by else ""
        print(f"{_size(rules.frees(entry)):>9}  {ended}  {entry.state:<6}  {entry.directory}{why}")
    print(f"{_counted(found, going, rules)} would go; --yes removes them")
    return 0


def _prune(found: Sequence[Entry], going: Sequence[Entry], rules: Rules, base: Path) -> int:
    sweep_up(base)
    gone: list[Entry] = []
    for entry in going:
        try:
            remove_tables(entry) if rules.tables else remove(entry)
            gone.append(entry)
        except RunError as problem:
            print(f"mcjax: {problem}", file=sys.stderr)
    print(f"{_counted(found, gone, rules)} removed")
    return 0 if len(gone) == len(going) else 1


def _counted(found: Sequence[Entry], going: Sequence[Entry], rules: Rules) -> str:
    what = "the tables of " if rules.tables else ""
    freed, all_bytes = sum(rules.frees(entry) for entry in going), sum(entry.nbytes for entry in found)
    return f"{what}{len(going)} of {len(found)} runs, {_size(freed)} of {_size(all_bytes)},"


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"
