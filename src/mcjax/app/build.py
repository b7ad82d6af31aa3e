"""Makes everything that a config names: workload, strategies, world."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, open_dict

from mcjax.app.compose import made, plain_of, plain_value
from mcjax.app.mistakes import check_arguments
from mcjax.app.plugins import PLACES, Plugins, fit
from mcjax.app.runner import Rehearsal, all_instances, read_changes
from mcjax.app.sample import uncached_tokens
from mcjax.app.streams import Stream, generator, seed_of, seed_workload
from mcjax.app.tokenizers import give_tokenizer
from mcjax.backends.base import Tiers, World, WorldInputs
from mcjax.backends.processes.fleet import Settings as LauncherSettings
from mcjax.backends.processes.world import ProcessesWorld
from mcjax.cost.base import CostModel
from mcjax.cost.model_shape import ModelShape
from mcjax.engine.cluster import Policies, Timing
from mcjax.engine.cluster_spec import parse_cluster
from mcjax.engine.service import Settings
from mcjax.errors import ConfigError
from mcjax.kernels.choice import KernelChoice
from mcjax.kvpool.keys import KeyTable, Salts
from mcjax.kvpool.quotas import parse_quotas
from mcjax.models.tokenizer import tokenizer_for
from mcjax.sched.placement import Strategies
from mcjax.track.recorder import TableRecorder
from mcjax.track.tracker import Settings as TrackSettings
from mcjax.transfer.paths.base import PathChoice
from mcjax.transfer.paths.health import Patience
from mcjax.transfer.paths.path import PathSettings
from mcjax.transfer.paths.queue import read_shares
from mcjax.transfer.topology import read_topology
from mcjax.types import NS_PER_S, Scripts
from mcjax.workload.base import Workload
from mcjax.workload.driver import ScriptBook
from mcjax.workload.slice import Slice

DEFAULT_BLOCK_TOKENS = 32


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
    instances = parse_cluster(plain_value(config.cluster))
    changes = read_changes(plain_value(config.cluster_changes), instances)
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
        tiers=_tiers(config),
        table=table,
        seed=config.seed,
        recorder=recorder,
        roles=[role for _, role in all_instances(instances, changes)],
        uncached_tokens=lambda: uncached_tokens(workload, block_tokens),
        kernels=KernelChoice(**plain_of(config.kernels)),
        topology=read_topology(plain_value(config.transfer.topology), hardware),
    )
    return Rehearsal(
        world=(make_world or _world_maker(config))(inputs),
        workload=workload,
        scripts=scripts,
        instances=instances,
        strategies=strategies_of(config, plugins, None if config.backend.name == "jax" else scripts),
        policies=policies_of(config, plugins, cost, block_tokens),
        slo=strategy_of("slo", config, plugins),
        settings=_settings(config, strategy_of("paths", config, plugins)),
        salts=Salts.from_environment(),
        table=table,
        recorder=recorder,
        policy_rng=generator(config.seed, Stream.POLICY),
        tokenizer=partial(tokenizer_for, model),
        changes=changes,
        sample_period_s=track.period_s(config.backend.name),
        stall_s=config.engine.stall_s,
    )


def _tiers(config: DictConfig) -> Tiers:
    kvpool = config.kvpool
    path = None if kvpool.ssd_path is None else Path(kvpool.ssd_path)
    encodings = kvpool.dram_encoding, kvpool.ssd_encoding
    ssd_bytes = None if kvpool.ssd_bytes is None else int(kvpool.ssd_bytes)  # 1e9 is how people write it
    return Tiers(ssd_bytes, path, *encodings, kvpool.huge_pages, kvpool.numa_node)


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


def policies_of(
    config: DictConfig, plugins: Plugins, cost: CostModel | None = None, block_tokens: int = DEFAULT_BLOCK_TOKENS
) -> Policies:
    """Makers of what every instance or node has one of its own of. Without `cost`: where nothing costs."""

    def maker(place: str) -> Callable[[], Any]:
        first = strategy_of(place, config, plugins)  # so that mistakes show now
        return lambda: told_cost(copy.deepcopy(first), cost, block_tokens)

    makers = {place: maker(place) for place in ("eviction", "watermark", "tiering", "batching", "tenancy")}
    return Policies(**makers, quotas=parse_quotas(plain_value(config.kvpool.tenants)))


def told_cost(strategy: Any, cost: CostModel | None, block_tokens: int) -> Any:
    """The same strategy, which knows what computing a block costs if it has `use_cost` (`kvpool.base.Eviction`)."""
    if cost is not None and hasattr(strategy, "use_cost"):
        strategy.use_cost(cost, block_tokens)
    return strategy


def workload_of(config: DictConfig) -> Any:
    """The workload that the config names, and those that it is made of, on the `workload` stream of the run's seed.

    Those that take a `tokenizer` and were given none get the model's.
    """
    section = copy.deepcopy(config.workload)
    seed_workload(section, seed_of(config.seed, Stream.WORKLOAD))
    model: ModelShape = made(config, "model")
    give_tokenizer(section, model.checkpoint, model.vocab)
    workload = fit("workload", made(config, "workload", section), "workload")
    return sliced(workload, config)


def sliced(workload: Workload, config: DictConfig) -> Any:
    """The stretch of the workload that `slices` and `slice` name. Raises `ConfigError` if nothing starts there."""
    slices = config.get("slices", 1)
    if slices == 1:
        return workload
    try:
        return Slice(workload, slices=slices, index=config.slice)
    except ConfigError as problem:
        if problem.key != "workload.start_s":  # the inner workload's own
            raise
        empty = f"no session starts in this one of slices={slices}; take fewer slices"
        raise ConfigError("slice", config.slice, empty) from None


def _settings(config: DictConfig, choice: PathChoice) -> Settings:
    engine, transfer = config.engine, config.transfer
    return Settings(
        report_period_s=config.sched.report_period_s,
        view_delay_s=config.sched.view_delay_s,
        attempts=config.sched.attempts,
        transfer_deadline_s=transfer.deadline_s,
        transfer_attempts=transfer.attempts,
        path_choice=choice,
        paths=PathSettings(
            shares=read_shares("transfer.shares", plain_value(transfer.shares)),
            patience=Patience(
                transfer.failures, round(transfer.backoff_s * NS_PER_S), round(transfer.most_backoff_s * NS_PER_S)
            ),
            slice_bytes=None if transfer.slice_bytes is None else int(transfer.slice_bytes),
            window_bytes=None if transfer.window_bytes is None else int(transfer.window_bytes),
        ),
        headroom_tokens=engine.headroom_tokens,
        preemption=engine.preemption,
        streaming=engine.streaming,
        max_steps=engine.max_steps,
        timeout_s=engine.timeout_s,
        hbm_cache=config.kvpool.hbm_cache,
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
    if config.launcher.name == "processes":
        return _in_processes(config, options)
    return made(config, "backend", options)


def _in_processes(config: DictConfig, options: DictConfig) -> Callable[[WorldInputs], World]:
    """The world of `launcher=processes`: what the backend's options say, the workers hear."""
    backend = {name: value for name, value in plain_of(options).items() if not name.startswith("_")}
    launcher = {name: value for name, value in plain_of(config.launcher).items() if name != "name"}
    return partial(
        ProcessesWorld, backend=backend, settings=LauncherSettings(**launcher), deadline_s=config.transfer.deadline_s
    )
