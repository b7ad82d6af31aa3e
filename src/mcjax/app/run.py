"""From a config to a run: composes it, makes everything it names, plays it, and keeps what came of it.

The only file that imports hydra and sees all worlds.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict

from mcjax.app.mistakes import check_arguments, locate
from mcjax.app.on_thread import on_thread
from mcjax.app.options import check_numbers, check_together, suggest, told
from mcjax.app.plugins import PLACES, Plugins, fit
from mcjax.app.runner import Performance, Rehearsal, Result, all_instances, read_changes
from mcjax.app.sample import uncached_tokens
from mcjax.app.streams import Stream, generator, seed_of, seed_workload
from mcjax.app.tokenizers import give_tokenizer
from mcjax.app.verify import SamePrompts, prove, within_margin
from mcjax.backends.base import World, WorldInputs
from mcjax.backends.jax.numerics import common_mesh
from mcjax.cost.model_shape import ModelShape
from mcjax.engine.cluster import Policies, Timing
from mcjax.engine.cluster_spec import parse_cluster
from mcjax.engine.service import Settings
from mcjax.errors import ConfigError, McjaxError, RunError, UserError, VerificationError
from mcjax.kvpool.keys import KeyTable, Salts
from mcjax.models.tokenizer import tokenizer_for
from mcjax.sched.placement import Strategies
from mcjax.track import console, environment
from mcjax.track.recorder import TableRecorder
from mcjax.track.run import Run
from mcjax.track.sinks.base import RunInfo
from mcjax.track.summary import summarise
from mcjax.track.tracker import Settings as TrackSettings
from mcjax.track.tracker import Tracker
from mcjax.types import NS_PER_S, Role, Scripts
from mcjax.workload.base import Workload
from mcjax.workload.driver import ScriptBook

DEFAULT_BLOCK_TOKENS = 32


def compose(overrides: Sequence[str]) -> DictConfig:
    """The config that `mcjax *overrides` would run. Hydra's own errors, with its suggestions, pass through."""
    with contextlib.ExitStack() as stack:
        if not GlobalHydra.instance().is_initialized():  # it is, inside another Hydra application
            stack.enter_context(initialize_config_module("mcjax.conf", version_base=None))
        try:
            return hydra_compose("config", told(overrides))
        except Exception as problem:
            suggest(problem)
            raise


def run(overrides: Sequence[str] = (), *, progress: bool | None = None, **strategies: Any) -> Run:
    """Run a config from Python: `mcjax.run(["backend=sim", "cluster=8p8d"], prefill=MyPick())`.

    Args:
        overrides: what the command line takes.
        progress: show live progress; by default where the output is a terminal.
        strategies: objects, classes or plain functions that take the place of what the config names: `prefill`,
            `decode`, `fetch`, `admission`, `tenancy`, `batching`, `roles`, `lengths`, `eviction`, `watermark`,
            `workload`, `cost`, `slo`. Of `tenancy`, `batching`, `eviction` and `watermark` every instance or node gets
            a copy of its own.

    Returns the run; after an interrupt, with what there was so far. Works inside a running event loop too.

    Raises:
        UserError: something to mend in the config, its files or the strategies; names it.
        VerificationError: the run was to prove something and did not.
    """
    plugins = Plugins(strategies)
    config = compose(overrides)
    show = sys.stdout.isatty() if progress is None else progress
    try:
        return _outside_loops(lambda: execute(config, plugins, ["mcjax", *overrides], show))
    except UserError as problem:
        if config.debug:
            raise
        raise problem.with_traceback(None) from None  # what to mend is in the message, not in our internals


def execute(config: DictConfig, plugins: Plugins, argv: Sequence[str], show_progress: bool = True) -> Run:
    """Run a composed config to its end, and keep it. Raises what ended the run, after the directory says so."""
    plain = plain_of(config)
    plain["plugins"] = plugins.names()
    check_numbers(plain)
    check_together(plain)
    if config.backend.name == "check":
        from mcjax.app import campaign  # which needs what is above

        return campaign.execute(
            config, lambda: strategies_of(config, plugins), policies_of(config, plugins), argv, show_progress
        )
    track = track_settings(config)
    workload = cast("Workload", plugins.get("workload") or workload_of(config))
    table = KeyTable()
    recorder = TableRecorder(table.key, track.level)
    rehearsal = build(config, plugins, workload, table, recorder, track)
    info = RunInfo(
        backend=config.backend.name,
        seed=config.seed,
        config=plain,
        environment=environment.describe(
            argv=list(argv), seed=config.seed, devices=rehearsal.world.devices(), inputs=workload.inputs()
        ),
    )
    total = int(getattr(workload, "total_requests", None) or 0)
    virtual = rehearsal.world.virtual
    progress = console.Progress(virtual=virtual, total_requests=total) if show_progress else console.NullProgress()
    try:
        tracker = Tracker(list(track.sinks), info)
    except OSError as problem:
        raise RunError(f"the run directory cannot be made: {problem}") from problem
    if tracker.directory is not None:
        recorder.write_to(tracker.directory)
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


def plain_of(config: DictConfig) -> dict[str, Any]:
    """A composed config as plain values."""
    return cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True))


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
    instances = parse_cluster(_plain(config.cluster))
    changes = read_changes(_plain(config.cluster_changes), instances)
    model, hardware = made(config, "model"), made(config, "hardware")
    cost = strategy_of("cost", config, plugins)
    if hasattr(cost, "check"):
        cost.check(hardware.name, model.name)
    scripts = ScriptBook()
    block_tokens = config.kvpool.block_tokens or workload.block_tokens or DEFAULT_BLOCK_TOKENS
    if workload.block_tokens and block_tokens != workload.block_tokens:
        problem = f"the workload's block ids stand for {workload.block_tokens} tokens"
        raise ConfigError("kvpool.block_tokens", block_tokens, problem, [workload.block_tokens, "null"])
    if config.backend.name == "jax" and workload.block_tokens:
        problem = "names its blocks by ids and has no tokens, which a real engine needs"
        raise ConfigError("workload", workload.name, problem, ["backend=sim"])
    inputs = WorldInputs(
        model=model,
        hardware=hardware,
        cost=cost,
        scripts=scripts,
        block_tokens=block_tokens,
        pool_bytes=config.kvpool.dram_bytes,
        seed=config.seed,
        recorder=recorder,
        roles=[role for _, role in all_instances(instances, changes)],
        uncached_tokens=lambda: uncached_tokens(workload, block_tokens),
        attention=config.kernels.attention,
    )
    return Rehearsal(
        world=(make_world or _world_maker(config))(inputs),
        workload=workload,
        scripts=scripts,
        instances=instances,
        strategies=strategies_of(config, plugins, None if config.backend.name == "jax" else scripts),
        policies=policies_of(config, plugins),
        slo=strategy_of("slo", config, plugins),
        settings=_settings(config),
        salts=Salts.from_environment(),
        table=table,
        recorder=recorder,
        policy_rng=generator(config.seed, Stream.POLICY),
        tokenizer=partial(tokenizer_for, model),
        changes=changes,
        sample_period_s=track.period_s(config.backend.name),
        stall_s=config.engine.stall_s,
    )


def made(config: DictConfig, key: str, section: Any = None) -> Any:
    """What the section at `key` names by its `_target_`. Raises `ConfigError` for a mistake in it.

    What the user's own code raises passes through as it is.
    """
    section = OmegaConf.select(config, key) if section is None else section
    if OmegaConf.is_missing(section, "_target_"):
        raise ConfigError(f"{key}._target_", "", "must be given, such as my_policy.Mine")
    target = locate(f"{key}._target_", section["_target_"])
    values = cast("dict[str, Any]", OmegaConf.to_container(section, resolve=True, throw_on_missing=True))
    arguments = {name: value for name, value in values.items() if not name.startswith("_")}
    check_arguments(key, target, arguments, partial=values.get("_partial_", False))
    try:
        return instantiate(section)
    except InstantiationException as problem:
        cause = problem.__cause__ or problem
        if isinstance(cause, McjaxError) or not section["_target_"].startswith("mcjax."):
            raise cause from None
        raise ConfigError(key, arguments, f"cannot be made: {cause}") from problem


def strategy_of(place: str, config: DictConfig, plugins: Plugins) -> Any:
    """What the caller gave for a place, else what the config names for it."""
    key = PLACES[place][0]
    return plugins.get(place) or fit(place, made(config, key), key)


def strategies_of(config: DictConfig, plugins: Plugins, scripts: Scripts | None = None) -> Strategies:
    """The conductor's decisions, made afresh."""
    places = ("prefill", "decode", "fetch", "admission", "roles")
    lengths = plugins.get("lengths") or made(config, "sched.lengths")
    if isinstance(lengths, partial):  # an oracle
        if scripts is None:
            raise ConfigError("sched.lengths", "oracle", "there are no scripts to read in this world", ["backend=sim"])
        lengths = cast("partial[Any]", lengths)(scripts)
    made_afresh = {place: strategy_of(place, config, plugins) for place in places}
    return Strategies(**made_afresh, lengths=fit("lengths", lengths, "sched.lengths"))


def policies_of(config: DictConfig, plugins: Plugins) -> Policies:
    """Makers of what every instance or node has one of its own of."""

    def maker(place: str) -> Callable[[], Any]:
        first = strategy_of(place, config, plugins)  # so that mistakes show now
        return lambda: copy.deepcopy(first)

    return Policies(**{place: maker(place) for place in ("eviction", "watermark", "batching", "tenancy")})


def workload_of(config: DictConfig) -> Any:
    """The workload that the config names, and those that it is made of, on the `workload` stream of the run's seed.

    Those that take a `tokenizer` and were given none get the model's.
    """
    section = copy.deepcopy(config.workload)
    seed_workload(section, seed_of(config.seed, Stream.WORKLOAD))
    model: ModelShape = made(config, "model")
    give_tokenizer(section, model.checkpoint, model.vocab)
    return fit("workload", made(config, "workload", section), "workload")


def _settings(config: DictConfig) -> Settings:
    engine = config.engine
    return Settings(
        report_period_s=config.sched.report_period_s,
        view_delay_s=config.sched.view_delay_s,
        attempts=config.sched.attempts,
        transfer_deadline_s=config.transfer.deadline_s,
        transfer_attempts=config.transfer.attempts,
        headroom_tokens=engine.headroom_tokens,
        preemption=engine.preemption,
        max_steps=engine.max_steps,
        timeout_s=engine.timeout_s,
        timing=Timing(engine.lease_s, engine.wait_s, engine.detect_s),
    )


def track_settings(config: DictConfig) -> TrackSettings:
    """What `conf/track` says, its sinks made."""
    values = {name: value for name, value in config.track.items() if name != "sinks"}
    check_arguments("track", TrackSettings, cast("dict[str, Any]", values))
    sinks = [made(config, f"track.sinks[{index}]") for index in range(len(config.track.sinks))]
    return TrackSettings(**cast("dict[str, Any]", values), sinks=sinks)


def _world_maker(config: DictConfig) -> Callable[[WorldInputs], World]:
    options = copy.deepcopy(config.backend)
    with open_dict(options):
        for key in ("name", "verify"):
            options.pop(key, None)
    return made(config, "backend", options)


def _wants_verification(config: DictConfig, workload: Workload) -> bool:
    """What the config says; else what the backend says, unless the workload is not made for it."""
    by_default = config.backend.get("verify", False) and getattr(workload, "verified_by_default", True)
    return bool(by_default if config.verify is None else config.verify)


def _verify(config: DictConfig, result: Result, recorder: TableRecorder) -> dict[str, Any] | None:
    """Serve the same prompts on one colocated instance and compare; or, where the run may differ from that by rounding,
    have the reference engine judge its tokens. Raises `VerificationError`."""
    instances = parse_cluster(_plain(config.cluster))
    roles = [role for _, role in all_instances(instances, read_changes(_plain(config.cluster_changes), instances))]
    disaggregated = any(spec.role is Role.PREFILL for spec in instances)
    mesh = common_mesh(config.backend.numerics, _plain(config.backend.mesh), roles)
    colocated = copy.deepcopy(config)
    colocated.cluster, colocated.cluster_changes, colocated.backend.mesh = "1m", [], mesh or 1
    events = recorder.tables()["events"]

    def rehearse(prompts: SamePrompts) -> Rehearsal:
        table = KeyTable()
        again = TableRecorder(table.key, "lean")
        return build(colocated, Plugins({}), prompts, table, again, TrackSettings(level="lean"))

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


def _plain(value: Any) -> Any:
    return OmegaConf.to_object(value) if OmegaConf.is_config(value) else value


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
        if verified:
            summary["verified"] = dict(verified)
        return tracker.finish(tables, summary, failure)
    except BaseException as problem:
        with contextlib.suppress(OSError):
            tracker.abandon(f"its tables could not be written: {type(problem).__name__}: {problem}")
        if isinstance(problem, OSError):
            raise RunError(f"{tracker.directory}: the run could not be kept: {problem}") from problem
        raise


def _outside_loops(work: Callable[[], Run]) -> Run:
    """Run `work` where no event loop is running: here, or (inside Jupyter's) on a thread of its own."""
    return work() if asyncio._get_running_loop() is None else on_thread(work)
