"""`mcjax.sweep`: many runs from Python."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from mcjax.app.options import told
from mcjax.app.sweep.expand import expanded
from mcjax.app.sweep.given import combinations
from mcjax.app.sweep.launcher import multirun
from mcjax.app.sweep.progress import NoSweepDisplay, SweepProgress
from mcjax.app.sweep.results import results_of, show_missing
from mcjax.app.sweep.study import Study
from mcjax.errors import UserError
from mcjax.track.runs import Runs


def sweep(
    overrides: Sequence[str] = (), *, progress: bool | None = None, workers: int | None = None, **strategies: Any
) -> Runs:
    """Run every combination: `mcjax.sweep(["backend=sim", "+slices=8"], prefill=[Mine(1), Mine(2)])`.

    The points are played in processes of their own, several at a time. Those that are on disk already are not played
    again. A point that fails is named on standard error, stands in `refused` with its reason, and stops no other.

    Args:
        overrides: what the command line takes: `cluster=4p4d,8p8d`, `+seeds=10`, `+slices=8`. They change slowest.
        progress: show how far it is; by default where the output is a terminal.
        workers: points at a time; by default one a core, on the real engine one.
        strategies: as for `mcjax.run`; of a list of them each is a value to sweep over.

    Returns the runs that are done, in the order of the points; after an interrupt, those that are done so far. Works
    inside a running event loop too, and with classes that a notebook defines.

    Raises:
        UserError: something to mend in the overrides or the strategies, before anything runs; names it.
    """
    show = sys.stdout.isatty() if progress is None else progress
    try:
        words = told(expanded(list(overrides)))
        if workers is not None:
            words.append(f"hydra.launcher.workers={workers}")
        study = Study(["mcjax", *overrides], combinations(strategies), SweepProgress() if show else NoSweepDisplay())
        multirun(words, study.launch)
    except UserError as problem:
        raise problem.with_traceback(None) from None  # what to mend is in the message, not in our internals
    study.end()
    runs = study.runs()
    results_of(runs)
    show_missing(study)
    return runs
