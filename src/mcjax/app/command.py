"""Hydra's command line: one run, or a sweep with `-m`; every mistake in words, and an exit status."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from hydra import main as hydra_main
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from mcjax.app import reuse
from mcjax.app.compose import choices_of
from mcjax.app.mistakes import own_traceback
from mcjax.app.options import suggest, told
from mcjax.app.plugins import Plugins
from mcjax.app.provenance import Origin
from mcjax.app.run import execute
from mcjax.app.sweep.expand import MULTIRUN, expanded
from mcjax.app.sweep.given import combinations
from mcjax.app.sweep.launcher import Batch, sweep_folder
from mcjax.app.sweep.progress import SweepProgress
from mcjax.app.sweep.results import show
from mcjax.app.sweep.study import Study
from mcjax.errors import McjaxError, UserError
from mcjax.track import console

DONE, FAILED, MISTAKE, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses: the run is done; it, or a point of the sweep, failed; what was asked cannot be run; Ctrl-C."""


def main(argv: Sequence[str]) -> int:
    """Run what the arguments say. Returns the exit status."""
    sys.path.insert(0, os.getcwd())  # a user's strategies lie beside what they run
    debug = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors on, and they are worded here
    statuses: list[int] = []
    study = Study(["mcjax", *argv], combinations({}), SweepProgress())

    @hydra_main(version_base=None, config_path="pkg://mcjax.conf", config_name="config")
    def task(config: DictConfig, batch: Batch | None = None) -> None:
        """Hydra calls it with one run's config; its launcher here, with all points of a sweep."""
        if batch is not None:
            study.launch(config, batch)
            return
        choices = choices_of(HydraConfig.get().runtime.choices)
        statuses.append(one_run(config, Origin(["mcjax", *argv], choices)))

    try:
        with sweep_folder() as folder:
            words = told(expanded(argv))
            asks = any(word.startswith("-") and word not in MULTIRUN for word in words)  # such as --cfg
            sys.argv = ["mcjax", *words, *([] if asks else [folder])]
            task()
    except KeyboardInterrupt:
        print("mcjax: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (HydraException, OmegaConfBaseException, UserError) as problem:
        if debug:
            raise
        suggest(problem)
        print(f"mcjax: {explain(problem)}", file=sys.stderr)
        return MISTAKE
    if not study.begun:
        return max(statuses, default=DONE)
    study.end()
    show(study)
    return INTERRUPTED if study.interrupted else FAILED if study.failures else DONE


def one_run(config: DictConfig, origin: Origin) -> int:
    """Progress, the summary, the run directory; or what went wrong. Returns the exit status."""
    try:
        kept = execute(config, Plugins({}), origin)
    except KeyboardInterrupt:
        print("mcjax: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as problem:
        if config.debug:
            traceback.print_exc()
        else:
            print(f"mcjax: {explain(problem)}", file=sys.stderr)
        return MISTAKE if isinstance(problem, UserError | OmegaConfBaseException) else FAILED
    if kept.cached:
        reuse.tell(kept)
    console.print_summary(kept.summary, kept.directory)
    if kept.state != "done":
        print(f"mcjax: {kept.reason}; the tables hold what there was", file=sys.stderr)
        return INTERRUPTED
    return DONE


def explain(problem: BaseException) -> str:
    """What to mend, as text. A traceback only for the user's own code, from its first line on, and for bugs of ours."""
    notes = "".join(f"\n{note}" for note in getattr(problem, "__notes__", []))
    if isinstance(problem, McjaxError):
        return f"{problem}{notes}"
    if isinstance(problem, HydraException | OmegaConfBaseException):
        return str(problem).split("\nConfig search path:")[0].rstrip() + notes
    own = own_traceback(problem)
    if own:
        return f"an error in your own code (debug=true shows how it was called):\n{own}"
    return "an error inside mcjax, please report it:\n" + "".join(traceback.format_exception(problem)).rstrip()
