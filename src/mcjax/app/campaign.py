"""`backend=check`: many seeded schedules under faults, one verdict, and the tables of the schedule worth looking at."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

from omegaconf import DictConfig

from mcjax.app import reuse
from mcjax.app.build import track_settings
from mcjax.app.compose import made, plain_of
from mcjax.app.provenance import Origin, Provenance
from mcjax.backends.check.faults import Faults
from mcjax.backends.check.schedule import Outcome, Parts, run_schedule
from mcjax.engine.cluster_spec import parse_cluster
from mcjax.errors import ConfigError, VerificationError
from mcjax.kvpool.keys import KeyTable
from mcjax.track import console, environment
from mcjax.track.recorder import TableRecorder
from mcjax.track.run import Run
from mcjax.track.sinks.base import RunInfo
from mcjax.track.summary import summarise
from mcjax.track.tracker import Tracker
from mcjax.types import NS_PER_S, NullRecorder, Recorder

SHOWN_PROBLEMS = 5
TOLD = 20


@dataclass(slots=True)
class Verdict:
    """Totals over all schedules."""

    schedules: int = 0
    requests: int = 0
    states: Counter[str] = field(default_factory=Counter[str])
    faults: Counter[str] = field(default_factory=Counter[str])
    failed: list[Outcome] = field(default_factory=list[Outcome])

    def add(self, outcome: Outcome) -> None:
        self.schedules += 1
        self.requests += outcome.requests
        self.states.update(outcome.states)
        self.faults.update(outcome.faults)
        if outcome.problems:
            self.failed.append(outcome)

    def summary(self) -> dict[str, Any]:
        return {
            "schedules": self.schedules,
            "failed_schedules": len(self.failed),
            "requests": self.requests,
            "states": dict(sorted(self.states.items())),
            "faults": dict(sorted(self.faults.items())),
            "problems": [{"seed": outcome.seed, "problems": outcome.problems} for outcome in self.failed],
        }


def run_campaign(
    seed: int, schedules: int, faults: Faults, parts: Parts, shape: str | None, tell: Any = None
) -> Verdict:
    """Run the schedules of `seed`, `seed + 1`, ...; `tell(what, share_done)` hears of progress."""
    verdict = Verdict()
    for index in range(schedules):
        verdict.add(run_schedule(seed + index, faults, parts, shape))
        if tell is not None and (index + 1) % max(1, schedules // TOLD) == 0:
            tell(f"schedule {index + 1} of {schedules}, {len(verdict.failed)} failed", (index + 1) / schedules)
    return verdict


def execute(
    config: DictConfig,
    strategies: Any,
    policies: Any,
    known: Provenance,
    origin: Origin,
    open_progress: console.OpenProgress,
) -> Run:
    """The campaign of a config, kept in a run directory.

    The tables, and the figures that come from them, are of one schedule: the first that failed, else the last.

    Raises:
        VerificationError: some schedule showed a problem; names the seeds and the first problems.
    """
    options, faults = config.backend, cast("Faults", made(config, "faults"))
    if options.schedules < 1:
        raise ConfigError("backend.schedules", options.schedules, "must be at least 1")
    if options.shape is not None:
        parse_cluster(options.shape)
    track = track_settings(config)
    info = RunInfo(
        backend="check",
        seed=config.seed,
        config=plain_of(config),
        environment=environment.describe(argv=list(origin.argv), seed=config.seed, inputs=known.record.inputs),
        record=known.record,
        sources=known.sources,
    )
    tracker = Tracker(list(track.sinks), info, track.finish_timeout_s)
    reuse.note(known.record.run_key, track.sinks, tracker.directory)
    began_s = time.monotonic()
    progress = open_progress(console.Outlook(virtual=True, directory=tracker.directory))
    quiet = Parts(strategies, policies, lambda table: NullRecorder())
    with progress:
        try:
            verdict = run_campaign(config.seed, options.schedules, faults, quiet, options.shape, progress.stage)
        except BaseException as problem:
            tracker.abandon(f"{type(problem).__name__}: {problem}")
            raise
    kept_seed = verdict.failed[0].seed if verdict.failed else config.seed + options.schedules - 1
    kept = _Kept(track.level)
    outcome = run_schedule(kept_seed, faults, Parts(strategies, policies, kept.recorder), options.shape)
    tables = kept.recorders[0].tables()
    summary = summarise(
        tables,
        backend="check",
        seed=config.seed,
        wall_s=time.monotonic() - began_s,
        duration_ns=round(outcome.virtual_s * NS_PER_S),
        warmup_ns=0,
        block_tokens=4,
    )
    summary |= kept.recorders[0].kept()
    summary["check"] = {**verdict.summary(), "kept_seed": kept_seed}
    failure = _describe(verdict) if verdict.failed else ""
    run = tracker.finish(tables, summary, failure)
    if failure:
        raise VerificationError(f"{failure}\nthe tables in {run.directory} are of seed {kept_seed}")
    return run


class _Kept:
    """Makes the recorder of the one schedule whose tables are kept."""

    def __init__(self, level: str):
        self.recorders: list[TableRecorder] = []
        self._level = level

    def recorder(self, table: KeyTable) -> Recorder:
        self.recorders.append(TableRecorder(table.key, self._level))
        return self.recorders[-1]


def _describe(verdict: Verdict) -> str:
    lines = [f"{len(verdict.failed)} of {verdict.schedules} schedules failed"]
    for outcome in verdict.failed[:SHOWN_PROBLEMS]:
        lines.append(f"  seed {outcome.seed} ({outcome.cluster}): {outcome.problems[0]}")
    return "\n".join(lines)
