"""`mcjax replay RUN`: decide a run's decisions again, from its own log, and say whether they agree.

Two ways. *Placements* walks the journal (`reports.parquet`): the cluster state is rebuilt row by row, and every
placement decided again from it. *Procedures* (real runs only) plays the whole run again in virtual time, with its
mechanisms' logged answers (`outcomes.parquet`) in the order in which they came, and compares every row of every table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from mcjax.app.build import build, sliced, workload_of
from mcjax.app.plugins import Plugins
from mcjax.app.runner import Performance, Rehearsal
from mcjax.backends.replay.world import Log, ReplayWorld
from mcjax.errors import Deadlock, McjaxError, RunError
from mcjax.kvpool.keys import KeyTable
from mcjax.sched.journal import Journal
from mcjax.sched.state import LinkEstimate, ssd_estimate
from mcjax.track.arrow import Table
from mcjax.track.console import NullProgress
from mcjax.track.find import find_one
from mcjax.track.levels import FULL
from mcjax.track.recorder import TableRecorder
from mcjax.track.run import Run, load
from mcjax.track.schemas import SCHEMA_VERSION
from mcjax.track.tracker import Settings as TrackSettings
from mcjax.types import Script

COMPARED = ("decisions", "requests", "reports", "events", "samples")


@dataclass(slots=True)
class Difference:
    """The first row of a table that differs."""

    table: str
    row: int
    column: str
    logged: Any
    replayed: Any

    def __str__(self) -> str:
        return f"{self.table} row {self.row}, {self.column}: logged {self.logged!r}, replayed {self.replayed!r}"


@dataclass(slots=True)
class Replayed:
    """What a replay showed."""

    placements: int = 0
    differing_placements: list[str] = field(default_factory=list[str])
    rows: dict[str, int] = field(default_factory=dict[str, int])
    differences: list[Difference] = field(default_factory=list[Difference])
    answers: int = 0
    unanswered: int = 0

    @property
    def agrees(self) -> bool:
        return not (self.differing_placements or self.differences or self.unanswered)


def replay(run: Run, **strategies: Any) -> Replayed:
    """Replay a finished run; `strategies` are the objects it was run with, if it was run from Python.

    Raises `RunError` for a run that does not hold what is needed.
    """
    run.require(FULL, "a replay needs every row")
    if (schema := run.summary.get("schema")) != SCHEMA_VERSION:
        raise RunError(
            f"{run.directory}: a run of schema version {schema} can be read, but not replayed: what it logs is decided "
            "again by the code that it ran; replay it with the mcjax that environment.json names"
        )
    config = OmegaConf.create(dict(run.config))
    missing = [place for place in config.get("plugins", {}) if place not in strategies]
    if missing:
        names = ", ".join(f"{place}={config.plugins[place]}()" for place in missing)
        raise RunError(f"the run used Python objects: give them again, mcjax.replay(run, {names})")
    result = Replayed()
    _placements(config, run, Plugins(strategies), result)
    if config.backend.name == "jax":
        _procedures(config, run, Plugins(strategies), result)
    return result


def _rehearse(config: DictConfig, run: Run, plugins: Plugins) -> tuple[Rehearsal, TableRecorder, Log]:
    """Everything of the run made again, with its log in the place of a real world."""
    columns = [run.outcomes.column(name).to_pylist() for name in ("time_ns", "mechanism", "call", "payload")]
    log = Log(list(zip(*columns, strict=True)))
    table = KeyTable()
    track = TrackSettings(sample_period_s=config.track.sample_period_s)
    recorder = TableRecorder(table.key, track.level)
    given = plugins.get("workload")
    workload = workload_of(config) if given is None else sliced(given, config)
    real = config.backend.name == "jax"
    rehearsal = build(
        config,
        plugins,
        workload,
        table,
        recorder,
        track,
        make_world=(lambda inputs: ReplayWorld(log, inputs.recorder, inputs.table)) if real else None,
    )
    return rehearsal, recorder, log


def _placements(config: DictConfig, run: Run, plugins: Plugins, result: Replayed) -> None:
    rehearsal, _, _ = _rehearse(config, run, plugins)
    for row in run.requests.select(["request_id", "output_tokens"]).to_pylist():
        rehearsal.scripts.put(
            row["request_id"], Script(row["output_tokens"])
        )  # for a run whose lengths were an oracle's
    world = rehearsal.world
    kv_format = world.kv_format()
    journal = Journal(
        rehearsal.strategies,
        world.cost(),
        LinkEstimate(*world.link()),
        kv_format.bytes_per_token,
        kv_format.block_tokens,
        rehearsal.policy_rng,
        ssd_estimate(world.ssd()),
    )
    for redecided in journal.walk(run.requests.to_pylist(), run.reports.to_pylist(), run.decisions.to_pylist()):
        result.placements += 1
        if not redecided.agrees:
            result.differing_placements.append(str(redecided))


def _procedures(config: DictConfig, run: Run, plugins: Plugins, result: Replayed) -> None:
    rehearsal, recorder, log = _rehearse(config, run, plugins)
    try:
        Performance(rehearsal, NullProgress(), lambda now_ns, figures: None).run()
    except (RunError, Deadlock) as problem:  # the replay took another way, and the log has no answer to what it asks
        result.differences.append(Difference("procedures", 0, type(problem).__name__, "", str(problem)))
    again = recorder.tables()
    for name in COMPARED:
        logged = run.table(name)
        result.rows[name] = logged.num_rows
        difference = first_difference(name, logged, again[name])
        if difference is not None:
            result.differences.append(difference)
    result.answers, result.unanswered = len(log), log.unanswered()


def first_difference(name: str, logged: Table, replayed: Table) -> Difference | None:
    """The first row in which two tables differ, or None."""
    if logged.equals(replayed):
        return None
    columns = logged.column_names
    ours, theirs = logged.to_pydict(), replayed.to_pydict()
    for row in range(min(logged.num_rows, replayed.num_rows)):
        for column in columns:
            a, b = ours[column][row], theirs[column][row]
            if not _same(a, b):
                return Difference(name, row, column, a, b)
    if logged.num_rows != replayed.num_rows:
        return Difference(name, min(logged.num_rows, replayed.num_rows), "(row)", logged.num_rows, replayed.num_rows)
    return None


def _same(a: Any, b: Any) -> bool:
    """Whether two values of a table are equal, where two NaN are, in lists too."""
    if isinstance(a, list) and isinstance(b, list):
        ours, theirs = cast("list[Any]", a), cast("list[Any]", b)
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    return a == b or (a != a and b != b)


def command(arguments: Sequence[str]) -> int:
    """`mcjax replay RUN`; exit status 0 only if everything agrees."""
    parser = argparse.ArgumentParser("mcjax replay", description=__doc__)
    parser.add_argument("run", help="a run: its directory, its name below runs/, or the first digits of its key")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_args(arguments)
    try:
        result = replay(load(find_one(options.run)))
    except McjaxError as problem:
        if options.debug:
            raise
        print(f"mcjax: {problem}", file=sys.stderr)
        return 1
    print(f"placements: {result.placements} decided again, {len(result.differing_placements)} differ")
    for line in result.differing_placements[:5]:
        print(f"  {line}")
    if result.rows:
        print(f"procedures: {result.answers} logged answers played in virtual time, {result.unanswered} not asked for")
        for difference in result.differences:
            if difference.table == "procedures":
                print(f"  {difference}")
        for name, rows in result.rows.items():
            differing = [difference for difference in result.differences if difference.table == name]
            print(f"  {name}: {rows} rows, {differing[0] if differing else 'all equal'}")
    print("everything agrees" if result.agrees else "the replay DIFFERS from the run")
    return 0 if result.agrees else 1
