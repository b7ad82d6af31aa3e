"""From a config to a run: composes it, makes everything it names, plays it, and keeps what came of it.

The only file that imports hydra and sees all worlds.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict

from mcjax.backends.base import World, WorldInputs
from mcjax.engine.cluster import Policies, Timing
from mcjax.engine.cluster_spec import parse_cluster
from mcjax.engine.service import Settings
from mcjax.errors import ConfigError, McjaxError, VerificationError
from mcjax.kvpool.keys import KeyTable, Salts
from mcjax.plugins import Plugins
from mcjax.runner import Change, Performance, Rehearsal, Result
from mcjax.sched.placement import Strategies
from mcjax.streams import Stream, generator, seed_of
from mcjax.track import console, environment
from mcjax.track.recorder import TableRecorder
from mcjax.track.run import Run
from mcjax.track.sinks.base import RunInfo
from mcjax.track.summary import summarise
from mcjax.track.tracker import Settings as TrackSettings
from mcjax.track.tracker import Tracker
from mcjax.types import NS_PER_S, Role
from mcjax.verify import SamePrompts, check_exercised, compare
from mcjax.workload.base import Workload
from mcjax.workload.driver import ScriptBook

DEFAULT_BLOCK_TOKENS = 32


def compose(overrides: Sequence[str]) -> DictConfig:
    """The config that `mcjax *overrides` would run. Hydra's own errors, with its suggestions, pass through."""
    state = GlobalHydra.instance()
    if state.is_initialized():  # called from inside another Hydra application
        return hydra_compose("config", list(overrides))
    with initialize_config_module("mcjax.conf", version_base=None):
        return hydra_compose("config", list(overrides))


def run(overrides: Sequence[str] = (), *, progress: bool | None = None, **strategies: Any) -> Run:
    """Run a config from Python: `mcjax.run(["backend=sim", "cluster=8p8d"], prefill=MyPick())`.

    Args:
        overrides: what the command line takes.
        progress: show live progress; by default where the output is a terminal.
        strategies: objects or plain functions that take the place of what the config names: `prefill`, `decode`,
            `fetch`, `admission`, `tenancy`, `batching`, `roles`, `eviction`, `watermark`, `workload`, `cost`, `slo`.

    Returns the run; after an interrupt, with what there was so far. Works inside a running event loop too.
    """
    plugins = Plugins(strategies)
    config = compose(overrides)
    show = sys.stdout.isatty() if progress is None else progress
    return _outside_loops(lambda: execute(config, plugins, ["mcjax", *overrides], show))


def execute(config: DictConfig, plugins: Plugins, argv: Sequence[str], show_progress: bool = True) -> Run:
    """Run a composed config to its end, and keep it. Raises what ended the run, after the directory says so."""
    if config.backend.name == "check":
        campaign = importlib.import_module("mcjax.campaign")
        return campaign.execute(
            config, lambda: strategies_of(config, plugins), policies_of(config, plugins), argv, show_progress
        )
    plain = cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True))
    track = TrackSettings(**instantiate(config.track))
    workload = cast("Workload", plugins.get("workload") or workload_of(config))
    table = KeyTable()
    recorder = TableRecorder(table.key, track.level)
    rehearsal = build(config, plugins, workload, table, recorder, track)
    info = RunInfo(
        backend=config.backend.name,
        seed=config.seed,
        config=plain,
        environment=environment.describe(argv=list(argv), seed=config.seed, inputs=workload.inputs()),
    )
    tracker = Tracker(list(track.sinks), info)
    progress = console.Progress(virtual=rehearsal.world.virtual) if show_progress else console.NullProgress()
    try:
        with progress:
            performance = Performance(rehearsal, progress, tracker.log)
            try:
                result = performance.run()
            except BaseException as problem:
                return _keep(config, tracker, recorder, rehearsal, performance.result, f"{type(problem).__name__}: {problem}", problem)
            verified: dict[str, Any] = {}
            failure, problem = ("interrupted", None) if result.interrupted else ("", None)
            if _wants_verification(config) and not failure:
                try:
                    verified = _verify(config, result, recorder, progress)
                except VerificationError as found:
                    failure, problem = f"verification: {found}", found
        return _keep(config, tracker, recorder, rehearsal, result, failure, problem, verified)
    except OSError as problem:
        tracker.abandon(str(problem))
        raise


def build(
    config: DictConfig,
    plugins: Plugins,
    workload: Workload,
    table: KeyTable,
    recorder: TableRecorder,
    track: TrackSettings,
    make_world: Callable[[WorldInputs], World] | None = None,
) -> Rehearsal:
    """Make everything that the config names. Raises `ConfigError` for what does not go together."""
    instances = parse_cluster(OmegaConf.to_object(config.cluster) if OmegaConf.is_config(config.cluster) else config.cluster)
    changes = [Change(**cast("dict[str, Any]", change)) for change in OmegaConf.to_container(config.cluster_changes) or []]
    model, hardware = instantiate(config.model), instantiate(config.hardware)
    cost = plugins.get("cost") or instantiate(config.cost)
    if hasattr(cost, "check"):
        cost.check(hardware.name, model.name)
    scripts = ScriptBook()
    block_tokens = config.kvpool.block_tokens or workload.block_tokens or DEFAULT_BLOCK_TOKENS
    if workload.block_tokens and block_tokens != workload.block_tokens:
        problem = f"the workload's block ids stand for {workload.block_tokens} tokens"
        raise ConfigError("kvpool.block_tokens", block_tokens, problem, [workload.block_tokens])
    inputs = WorldInputs(
        model=model,
        hardware=hardware,
        cost=cost,
        scripts=scripts,
        block_tokens=block_tokens,
        pool_bytes=config.kvpool.dram_bytes,
        seed=config.seed,
        recorder=recorder,
        instances=len(instances) + sum(change.join is not None for change in changes),
        attention=config.kernels.attention,
    )
    return Rehearsal(
        world=(make_world or _world_maker(config))(inputs),
        workload=workload,
        scripts=scripts,
        instances=instances,
        strategies=strategies_of(config, plugins),
        policies=policies_of(config, plugins),
        slo=plugins.get("slo") or instantiate(config.slo),
        settings=_settings(config),
        salts=Salts.from_environment(),
        table=table,
        recorder=recorder,
        policy_rng=generator(config.seed, Stream.POLICY),
        changes=changes,
        sample_period_s=track.sample_period_s,
        stall_s=config.engine.stall_s,
    )


def strategies_of(config: DictConfig, plugins: Plugins) -> Strategies:
    """The conductor's decisions, made afresh."""
    sched = config.sched
    return Strategies(
        prefill=plugins.get("prefill") or instantiate(sched.prefill),
        decode=plugins.get("decode") or instantiate(sched.decode),
        fetch=plugins.get("fetch") or instantiate(sched.fetch),
        admission=plugins.get("admission") or instantiate(sched.admission),
        roles=plugins.get("roles") or instantiate(sched.roles),
    )


def policies_of(config: DictConfig, plugins: Plugins) -> Policies:
    """Makers of what every instance or node has one of its own of."""

    def maker(name: str, section: DictConfig) -> Callable[[], Any]:
        given = plugins.get(name)
        if given is not None:
            return lambda: copy.deepcopy(given)
        instantiate(section)  # so that mistakes show now
        return lambda: instantiate(section)

    return Policies(
        eviction=maker("eviction", config.kvpool.eviction),
        watermark=maker("watermark", config.kvpool.watermark),
        batching=maker("batching", config.sched.batching),
        tenancy=maker("tenancy", config.sched.tenancy),
    )


def _settings(config: DictConfig) -> Settings:
    engine = config.engine
    if engine.max_steps is not None and engine.max_steps < 1:
        raise ConfigError("engine.max_steps", engine.max_steps, "must be at least 1, or null")
    if config.sched.report_period_s <= 0:
        raise ConfigError("sched.report_period_s", config.sched.report_period_s, "must be more than 0 seconds")
    return Settings(
        report_period_s=config.sched.report_period_s,
        view_delay_s=config.sched.view_delay_s,
        attempts=config.sched.attempts,
        transfer_deadline_s=config.transfer.deadline_s,
        transfer_attempts=config.transfer.attempts,
        max_steps=engine.max_steps,
        timing=Timing(engine.lease_s, engine.wait_s, engine.detect_s),
    )


def workload_of(config: DictConfig) -> Any:
    section = copy.deepcopy(config.workload)
    if "seed" in section:
        section.seed = seed_of(config.seed, Stream.WORKLOAD)
    return instantiate(section)


def _world_maker(config: DictConfig) -> Callable[[WorldInputs], World]:
    options = copy.deepcopy(config.backend)
    with open_dict(options):
        for key in ("name", "verify"):
            options.pop(key, None)
    return instantiate(options)


def _wants_verification(config: DictConfig) -> bool:
    return bool(config.backend.get("verify", False) if config.verify is None else config.verify)


def _verify(config: DictConfig, result: Result, recorder: TableRecorder, progress: console.ProgressDisplay) -> dict[str, Any]:
    """Serve the same prompts on one colocated instance and compare. Raises `VerificationError`."""
    colocated = copy.deepcopy(config)
    colocated.cluster, colocated.cluster_changes = "1m", []
    if not config.backend.name == "jax":
        raise ConfigError("verify", True, "only the real engine can be compared with a colocated one", ["backend=jax"])
    table, quiet = KeyTable(), TrackSettings(level="lean")
    again = TableRecorder(table.key, "lean")
    rehearsal = build(colocated, Plugins({}), SamePrompts(result.rows), table, again, quiet)
    progress.stage("verifying against the colocated engine")
    other = Performance(rehearsal, console.NullProgress(), lambda now_ns, figures: None).run()
    if other.interrupted:
        raise VerificationError("interrupted")
    verified = compare(result, other)
    roles = {spec.role for spec in parse_cluster(_plain(config.cluster))}
    check_exercised(result, recorder.tables()["events"], disaggregated=Role.PREFILL in roles)
    return asdict(verified)


def _plain(value: Any) -> Any:
    return OmegaConf.to_object(value) if OmegaConf.is_config(value) else value


def _keep(
    config: DictConfig,
    tracker: Tracker,
    recorder: TableRecorder,
    rehearsal: Rehearsal,
    result: Result,
    failure: str,
    problem: BaseException | None,
    verified: Mapping[str, Any] | None = None,
) -> Run:
    """Write what there is, then raise `problem` if the run ended by one."""
    tables = recorder.tables()
    summary = summarise(
        tables,
        backend=config.backend.name,
        seed=config.seed,
        wall_s=result.wall_s,
        duration_ns=result.duration_ns,
        warmup_ns=round(config.track.warmup_s * NS_PER_S),
        block_tokens=rehearsal.world.kv_format().block_tokens,
        bytes_by_transport=result.bytes_by_transport,
    )
    if verified:
        summary["verified"] = dict(verified)
    kept = tracker.finish(tables, summary, failure)
    if problem is not None:
        problem.add_note(f"what there was is kept in {tracker.directory}") if tracker.directory else None
        raise problem
    return kept


def _outside_loops(work: Callable[[], Run]) -> Run:
    """Run `work` where no event loop is running: here, or (inside Jupyter's) on a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    outcome: dict[str, Any] = {}

    def body() -> None:
        try:
            outcome["run"] = work()
        except BaseException as problem:
            outcome["problem"] = problem

    thread = threading.Thread(target=body, name="mcjax.run")
    thread.start()
    while thread.is_alive():
        try:
            thread.join(0.2)
        except KeyboardInterrupt:
            _interrupt(thread)
    if "problem" in outcome:
        raise outcome["problem"]
    return outcome["run"]


def _interrupt(thread: threading.Thread) -> None:
    """Raise `KeyboardInterrupt` in another thread: the run then ends as it would on the command line."""
    import ctypes

    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt))


def command(config: DictConfig, argv: Sequence[str]) -> None:
    """One run from the command line: progress, the summary, the run directory."""
    kept = execute(config, Plugins({}), argv)
    console.print_summary(kept.summary, kept.directory)
    if kept.state != "done":
        print(f"mcjax: {kept.reason}; the tables hold what there was", file=sys.stderr)
        raise SystemExit(130)


def main(argv: Sequence[str]) -> int:
    """Hydra's command line: one run, or a sweep with `-m`. Returns the exit status."""
    from hydra import main as hydra_main

    sys.path.insert(0, str(Path.cwd()))  # a user's strategies lie beside what they run
    sys.argv = ["mcjax", *argv]
    failures: list[str] = []
    sweep = "-m" in argv or "--multirun" in argv

    @hydra_main(version_base=None, config_path="pkg://mcjax.conf", config_name="config")
    def task(config: DictConfig) -> None:
        try:
            command(config, sys.argv)
        except (McjaxError, InstantiationException) as problem:
            if config.debug:
                raise
            print(f"mcjax: {readable(problem)}", file=sys.stderr)
            failures.append(str(problem))
            if not sweep:
                raise SystemExit(1) from None

    task()
    if failures:
        print(f"mcjax: {len(failures)} of the sweep's points failed, see above", file=sys.stderr)
    return 1 if failures else 0


def readable(problem: BaseException) -> str:
    """The message a user can act on: of our own error, where Hydra wrapped one."""
    cause = problem.__cause__ or problem.__context__
    message = str(cause) if isinstance(problem, InstantiationException) and isinstance(cause, McjaxError) else str(problem)
    notes = getattr(problem, "__notes__", [])
    return "\n".join([message, *notes])
