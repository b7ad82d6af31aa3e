"""From a config to a run: composes it, makes everything it names, plays it, and keeps what came of it.

`app` is the only package that imports hydra and sees all worlds.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

from omegaconf import DictConfig

from mcjax.app import reuse
from mcjax.app.build import build, policies_of, sliced, strategies_of, track_settings, workload_of
from mcjax.app.compose import compose_with_choices, plain_of, plain_value
from mcjax.app.on_thread import on_thread
from mcjax.app.plugins import Plugins
from mcjax.app.provenance import Origin, provenance
from mcjax.app.runner import Performance, Rehearsal, Result, all_instances, read_changes
from mcjax.app.schema.check import check
from mcjax.app.verify import SamePrompts, prove, within_margin
from mcjax.backends.jax.numerics import common_mesh
from mcjax.engine.cluster_spec import parse_cluster
from mcjax.errors import RunError, UserError, VerificationError
from mcjax.kernels.choice import KernelChoice
from mcjax.kvpool.keys import KeyTable
from mcjax.track import console, environment
from mcjax.track.recorder import TableRecorder
from mcjax.track.run import Run
from mcjax.track.sinks.base import RunInfo
from mcjax.track.summary import summarise
from mcjax.track.tracker import Settings as TrackSettings
from mcjax.track.tracker import Tracker
from mcjax.types import NS_PER_S, Role
from mcjax.workload.base import Workload


def run(overrides: Sequence[str] = (), *, progress: bool | None = None, **strategies: Any) -> Run:
    """Run a config from Python: `mcjax.run(["backend=sim", "cluster=8p8d"], prefill=MyPick())`.

    Args:
        overrides: what the command line takes.
        progress: show live progress; by default where the output is a terminal.
        strategies: objects, classes or plain functions that take the place of what the config names: `prefill`,
            `decode`, `fetch`, `admission`, `tenancy`, `batching`, `roles`, `lengths`, `eviction`, `watermark`,
            `workload`, `cost`, `slo`. Of `tenancy`, `batching`, `eviction` and `watermark` every instance or node gets
            a copy of its own.

    Returns the run; after an interrupt, with what there was so far. A virtual run that has finished before, with the
    same config, code and inputs, is not repeated (`run.cached`), unless `rerun=true` says so. Works inside a running
    event loop too.

    Raises:
        UserError: something to mend in the config, its files or the strategies; names it.
        VerificationError: the run was to prove something and did not.
    """
    plugins = Plugins(strategies)
    config, choices = compose_with_choices(overrides)
    origin = Origin(["mcjax", *overrides], choices)
    show = sys.stdout.isatty() if progress is None else progress
    try:
        found = outside_loops(lambda: execute(config, plugins, origin, console.shown if show else console.hidden))
    except UserError as problem:
        if config.debug:
            raise
        raise problem.with_traceback(None) from None  # what to mend is in the message, not in our internals
    if found.cached and show:
        reuse.tell(found)
    return found


def execute(
    config: DictConfig, plugins: Plugins, origin: Origin, open_progress: console.OpenProgress = console.shown
) -> Run:
    """Run a composed config to its end, and keep it; or take the run that has finished with the same key.

    Raises what ended the run, after the directory says so.
    """
    plain = plain_of(config)
    plain["plugins"] = plugins.names()
    check(plain)
    track = track_settings(config)
    known = provenance(plain, plugins, origin)
    finished = reuse.finished(plain, known.record.run_key, track.sinks)
    if finished is not None:
        return finished
    if config.backend.name == "check":
        from mcjax.app import campaign  # which needs what is above

        return campaign.execute(
            config, lambda: strategies_of(config, plugins), policies_of(config, plugins), known, origin, open_progress
        )
    if config.backend.name == "hits":
        from mcjax.app.hit_rates import study

        return study.execute(config, plugins, known, origin, open_progress)
    given = plugins.get("workload")
    workload = cast("Workload", workload_of(config) if given is None else sliced(given, config))
    table = KeyTable()
    recorder = TableRecorder(table.key, track.level)
    rehearsal = build(config, plugins, workload, table, recorder, track)
    known = known.with_inputs(workload.inputs())
    info = RunInfo(
        backend=config.backend.name,
        seed=config.seed,
        config=plain,
        environment=environment.describe(
            argv=list(origin.argv),
            seed=config.seed,
            devices=rehearsal.world.devices(),
            inputs=known.record.inputs,
        ),
        record=known.record,
        sources=known.sources,
    )
    total = int(getattr(workload, "total_requests", None) or 0)
    try:
        tracker = Tracker(list(track.sinks), info, track.finish_timeout_s)
    except OSError as problem:
        raise RunError(f"the run directory cannot be made: {problem}") from problem
    if rehearsal.world.virtual:
        reuse.note(known.record.run_key, track.sinks, tracker.directory)
    if tracker.directory is not None:
        recorder.write_to(tracker.directory, track.budget_bytes)
    progress = open_progress(console.Outlook(rehearsal.world.virtual, total, tracker.directory))
    performance = Performance(rehearsal, progress, tracker.log, to_verify=_wants_verification(config, workload))
    failure, ended_by, verified = "", None, None
    began_s = time.monotonic()
    wall_s = None
    try:
        with progress:
            result = performance.run()
            wall_s = time.monotonic() - began_s
            if not result.interrupted and _wants_verification(config, workload):
                progress.stage("verifying against the reference engine")
                verified = _verify(config, result, recorder)
                result.interrupted = verified is None
            failure = "interrupted" if result.interrupted else ""
    except KeyboardInterrupt:
        failure = "interrupted"
    except BaseException as problem:
        kind = "verification" if isinstance(problem, VerificationError) else type(problem).__name__
        failure, ended_by = f"{kind}: {problem}", problem
    wall_s = time.monotonic() - began_s if wall_s is None else wall_s
    kept = _keep(config, tracker, recorder, rehearsal, performance.result, wall_s, failure, verified)
    if ended_by is not None:
        if kept.directory is not None:
            ended_by.add_note(f"what there was is kept in {kept.directory}")
        raise ended_by
    return kept


def _wants_verification(config: DictConfig, workload: Workload) -> bool:
    """What the config says; else what the backend says, unless the workload is not made for it, or blocks are rounded:
    those in host memory, or those of requests that may accept it."""
    refuses = "workload" not in config.get("plugins", {}) and config.workload.get("accepts_lossy") is False
    exact = config.kvpool.dram_encoding == "none" and (config.kvpool.ssd_encoding == "none" or refuses)
    by_default = config.backend.get("verify", False) and exact and getattr(workload, "verified_by_default", True)
    return bool(by_default if config.verify is None else config.verify)


def _verify(config: DictConfig, result: Result, recorder: TableRecorder) -> dict[str, Any] | None:
    """Serve the same prompts on one colocated instance and compare; or, where the run may differ from that by rounding,
    have the reference engine judge its tokens. Raises `VerificationError`."""
    instances = parse_cluster(plain_value(config.cluster))
    roles = [role for _, role in all_instances(instances, read_changes(plain_value(config.cluster_changes), instances))]
    disaggregated = any(spec.role is Role.PREFILL for spec in instances)
    mesh = common_mesh(config.backend.numerics, plain_value(config.backend.mesh), roles)
    if not KernelChoice(**plain_of(config.kernels)).exact:
        mesh = None
    colocated = copy.deepcopy(config)
    colocated.cluster, colocated.cluster_changes = "1m", []
    colocated.backend.mesh = 1 if mesh is None else asdict(mesh)
    colocated.launcher = {"name": "embedded"}
    # The reference takes nothing from the tiers that are to be proven.
    colocated.kvpool.hbm_cache, colocated.kvpool.ssd_path, colocated.kvpool.ssd_bytes = False, None, None
    events = recorder.tables()["events"]

    def rehearse(prompts: SamePrompts) -> Rehearsal:
        table = KeyTable()
        again = TableRecorder(table.key, "requests")
        return build(colocated, Plugins({}), prompts, table, again, TrackSettings(level="requests"))

    def play(prompts: SamePrompts) -> Result:
        performance = Performance(
            rehearse(prompts), console.NullProgress(), lambda now_ns, figures: None, to_verify=True
        )
        return performance.run()

    if mesh is None:
        world = cast("Any", rehearse(SamePrompts([])).world)
        return asdict(within_margin(result, events, disaggregated, world.reference(), world.tolerance))
    verified = prove(result, events, disaggregated, play)
    return None if verified is None else asdict(verified)


def _keep(
    config: DictConfig,
    tracker: Tracker,
    recorder: TableRecorder,
    rehearsal: Rehearsal,
    result: Result,
    wall_s: float,
    failure: str,
    verified: Mapping[str, Any] | None,
) -> Run:
    """Write what there is. Raises `RunError` when it cannot be written."""
    try:
        tables = recorder.tables()
        summary = summarise(
            tables,
            backend=config.backend.name,
            seed=config.seed,
            wall_s=wall_s,
            duration_ns=result.duration_ns,
            warmup_ns=round(config.track.warmup_s * NS_PER_S),
            block_tokens=rehearsal.world.kv_format().block_tokens,
            bytes_by_transport=result.bytes_by_transport,
            world=result.figures,
        )
        summary |= recorder.kept()
        if verified:
            summary["verified"] = dict(verified)
        return tracker.finish(tables, summary, failure)
    except BaseException as problem:
        with contextlib.suppress(OSError):
            tracker.abandon(f"its tables could not be written: {type(problem).__name__}: {problem}")
        if isinstance(problem, OSError):
            raise RunError(f"{tracker.directory}: the run could not be kept: {problem}") from problem
        raise


def outside_loops(work: Callable[[], Run]) -> Run:
    """Run `work` where no event loop is running: here, or (inside Jupyter's) on a thread of its own."""
    return work() if asyncio._get_running_loop() is None else on_thread(work)
