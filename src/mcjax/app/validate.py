"""`mcjax validate [key=value ...]`: the simulator against the real engine on this machine.

Measures what steps, copies and hand-offs take here (a `cost=measured`), plays the same traffic for real and simulated
in turn at several loads, and writes how far the two are apart. What is in --output already is not done again, so an
interrupted validation goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from mcjax.app.command import FAILED, MISTAKE, explain
from mcjax.errors import ConfigError, RunError, UserError

LOADS = "0.3,0.6,0.9"
REPEATS = 3
SESSIONS = 40
QUICK_SESSIONS = 3


def command(arguments: Sequence[str]) -> int:
    """Exit status 0 when the comparison is written, whatever it says; 1 if a run failed; 2 if it cannot be made."""
    parser = argparse.ArgumentParser(
        "mcjax validate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for a real run: model=... cluster=...")
    parser.add_argument(
        "--output", metavar="DIR", help="a new folder, or one to go on in; by default validation/<date>"
    )
    parser.add_argument("--loads", default=LOADS, help=f"shares of the capacity, besides saturation; {LOADS}")
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"of every load, each another seed; {REPEATS}")
    parser.add_argument("--sessions", type=int, default=None, help=f"of the workload in each run; {SESSIONS}")
    parser.add_argument("--quick", action="store_true", help="saturation only, little of everything: does it work")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_intermixed_args(arguments)
    try:
        folder = Path(options.output or Path("validation") / time.strftime("%Y-%m-%d_%H-%M-%S"))
        _validate(options, folder)
    except (UserError, HydraException, OmegaConfBaseException, RunError) as problem:
        if options.debug:
            raise
        print(f"mcjax: {explain(problem)}", file=sys.stderr)
        return FAILED if isinstance(problem, RunError) else MISTAKE
    return 0


def _validate(options: argparse.Namespace, folder: Path) -> None:
    from mcjax.app.validation.calibration import QUICK, Effort
    from mcjax.app.validation.page import step_table, table
    from mcjax.app.validation.points import Settings
    from mcjax.app.validation.study import Study

    quick = options.quick
    loads = _loads(options.loads)
    settings = Settings(
        overrides=tuple(options.overrides),
        loads=() if quick else loads,
        repeats=1 if quick else options.repeats,
        sessions=options.sessions or (QUICK_SESSIONS if quick else SESSIONS),
        effort=QUICK if quick else Effort(),
    )
    settings.check()
    try:
        study = Study(settings, folder, lambda text: print(text, flush=True))
    except OSError as problem:
        raise ConfigError("--output", folder, f"cannot be written ({problem.strerror})") from None
    found, steps = study.run()
    print("\n".join(["", *table(found), "", *step_table(steps), ""]))
    print(f"{folder / 'validation.md'}, .json and .png are written")
    print(f"use the costs: mcjax backend=sim cost=measured cost.path='{folder / 'measured.json'}' ...")


def _loads(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError("--loads", text, f"must be numbers between commas, such as {LOADS}") from None
