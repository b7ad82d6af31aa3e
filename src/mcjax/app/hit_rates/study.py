"""`backend=hits`: the replays that a config asks for, kept in a run directory with their table and their picture."""

from __future__ import annotations

import contextlib
import csv
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from omegaconf import DictConfig, OmegaConf

from mcjax.app import reuse
from mcjax.app.build import policies_of, strategy_of, told_cost, track_settings
from mcjax.app.compose import made, plain_of
from mcjax.app.figures import published
from mcjax.app.hit_rates.replay import Chains, chains_of
from mcjax.app.hit_rates.worker import BELADY
from mcjax.app.hit_rates.workers import Stock, Task, cores, in_order
from mcjax.app.mistakes import close_to
from mcjax.app.plugins import Plugins, fit
from mcjax.app.provenance import Origin, Provenance
from mcjax.app.schema.files import groups, section_of
from mcjax.cost.base import CostModel
from mcjax.errors import ConfigError, RunError
from mcjax.kvpool.keys import KeyTable
from mcjax.track import console, environment
from mcjax.track.recorder import TableRecorder
from mcjax.track.run import Run
from mcjax.track.sinks.base import RunInfo
from mcjax.track.summary import summarise
from mcjax.track.tracker import Tracker
from mcjax.workload.mooncake import Mooncake
from mcjax.workload.mooncake_file import PUBLISHED

GROUP = "kvpool/eviction"
_HOW = "+workload@backend.traces.mine=mooncake backend.traces.mine.path=FILE"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is replayed: each policy through each capacity on each trace; what cannot differ, once."""

    stock: Stock
    policies: Sequence[str]
    capacities: Sequence[int]
    """Tokens."""
    tasks: Sequence[Task]
    inputs: Mapping[str, str]
    published: Sequence[Mapping[str, Any]]


def execute(
    config: DictConfig, plugins: Plugins, known: Provenance, origin: Origin, open_progress: console.OpenProgress
) -> Run:
    """The hit rates of a config, kept in a run directory: in the summary, as `hit_rates.csv` and as a picture.

    Raises `ConfigError` for policies, traces and sizes that cannot be replayed, `RunError` if a worker dies.
    """
    cost = strategy_of("cost", config, plugins)
    plan = plan_of(config, plugins, origin, cost)
    known = known.with_inputs(plan.inputs)
    track = track_settings(config)
    recorder = TableRecorder(KeyTable().key, track.level)
    info = RunInfo(
        backend="hits",
        seed=config.seed,
        config={**plain_of(config), "plugins": plugins.names()},
        environment=environment.describe(argv=list(origin.argv), seed=config.seed, inputs=known.record.inputs),
        record=known.record,
        sources=known.sources,
    )
    try:
        tracker = Tracker(list(track.sinks), info, track.finish_timeout_s)
    except OSError as problem:
        raise RunError(f"the run directory cannot be made: {problem}") from problem
    reuse.note(known.record.run_key, track.sinks, tracker.directory)
    began_s = time.monotonic()
    processes = min(config.backend.processes or cores(), len(plan.tasks))
    found: dict[Task, list[int]] = {}
    failure = ""
    with open_progress(console.Outlook(virtual=True, directory=tracker.directory)) as progress:
        try:
            with contextlib.closing(in_order(plan.stock, plan.tasks, processes)) as results:
                for task, counts in results:
                    found[task] = counts
                    progress.stage("replays", len(found) / len(plan.tasks))
        except KeyboardInterrupt:
            failure = "interrupted"
        except BaseException as problem:
            tracker.abandon(f"{type(problem).__name__}: {problem}")
            raise
    tables = recorder.tables()
    summary = summarise(
        tables,
        backend="hits",
        seed=config.seed,
        wall_s=time.monotonic() - began_s,
        duration_ns=0,
        warmup_ns=0,
        block_tokens=_block_tokens(config),
    )
    summary |= recorder.kept()
    rows = rows_of(plan, found, cost)
    summary["hits"] = {
        "block_tokens": _block_tokens(config),
        "replays": len(found),
        "processes": processes,
        "rows": rows,
        "published": list(plan.published),
    }
    if tracker.directory is not None and rows:
        _write_table(tracker.directory / "hit_rates.csv", rows)
    return tracker.finish(tables, summary, failure)


def _write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    except OSError as problem:
        raise RunError(f"{path} cannot be written: {problem.strerror}") from problem


def plan_of(config: DictConfig, plugins: Plugins, origin: Origin, cost: CostModel) -> Plan:
    """What there is to replay. Raises `ConfigError`."""
    block_tokens = _block_tokens(config)
    capacities = sorted(dict.fromkeys(int(tokens) for tokens in config.backend.capacities_tokens))
    if not capacities or capacities[0] < block_tokens:
        least = capacities[0] if capacities else "[]"
        raise ConfigError("backend.capacities_tokens", least, f"a pool holds at least a block of {block_tokens} tokens")
    workloads = {str(name): _trace(config, str(name)) for name in config.backend.traces}
    if not workloads:
        raise ConfigError("backend.traces", "{}", f"name at least one ({_HOW})")
    traces = {
        name: chains_of(workload.rows, cast("int", workload.block_tokens), block_tokens)
        for name, workload in workloads.items()
    }
    strategies = _strategies(config, plugins, origin)
    policies = list(strategies)
    stock = Stock(
        traces,
        {name: told_cost(strategy, cost, block_tokens) for name, strategy in strategies.items() if name != BELADY},
        policies_of(config, plugins).watermark(),
    )
    tasks = list(
        dict.fromkeys(
            _task(chains, name, policies, policy, capacity // block_tokens)
            for name, chains in traces.items()
            for policy in policies
            for capacity in capacities
        )
    )
    inputs = {path: sha256 for workload in workloads.values() for path, sha256 in workload.inputs().items()}
    lru = [
        {"trace": name, "capacity_tokens": capacity, "hit_rate": rate}
        for name, workload in workloads.items()
        if (paper := _published_name(workload)) is not None
        for capacity, rate in [
            *zip(published.CAPACITIES, published.LRU_HIT_RATES[paper], strict=True),
            (published.ENDLESS_TOKENS, published.MAX_HIT_RATES[paper]),
        ]
    ]
    return Plan(stock, policies, capacities, tasks, inputs, lru)


def rows_of(plan: Plan, found: Mapping[Task, Sequence[int]], cost: CostModel) -> list[dict[str, Any]]:
    """A row for each trace, policy and capacity that was replayed."""
    rows: list[dict[str, Any]] = []
    for name, chains in plan.stock.traces.items():
        longest = max(map(len, chains.blocks))
        size = chains.block_tokens
        prefix_ns = np.array([cost.prefill_ns(0, count * size) for count in range(longest + 1)])
        whole_ns = sum(cost.prefill_ns(0, tokens) for tokens in chains.prompt_tokens)
        blocks = sum(map(len, chains.blocks))
        for policy in plan.policies:
            for capacity in plan.capacities:
                counts = found.get(_task(chains, name, plan.policies, policy, capacity // size))
                if counts is not None:
                    rows.append(
                        {
                            "trace": name,
                            "policy": policy,
                            "capacity_tokens": capacity,
                            "capacity_blocks": capacity // size,
                            "hit_rate": chains.hit_rate(counts),
                            "block_hit_rate": sum(counts) / blocks,
                            "saved_prefill": float(prefix_ns[np.array(counts)].sum() / whole_ns),
                        }
                    )
    return rows


def _task(chains: Chains, trace: str, policies: Sequence[str], policy: str, capacity: int) -> Task:
    """Pools that never evict are all alike: one replay serves them all."""
    distinct = chains.distinct
    return Task(trace, policies[0], distinct) if capacity >= distinct else Task(trace, policy, capacity)


def _block_tokens(config: DictConfig) -> int:
    return config.kvpool.block_tokens or 512


def _trace(config: DictConfig, name: str) -> Mooncake:
    key = f"backend.traces.{name}"
    section = config.backend.traces[name]
    if not OmegaConf.is_dict(section) or "_target_" not in section:
        raise ConfigError(key, section, f"must be one of the options of workload ({_HOW})")
    workload = made(config, key)
    if not isinstance(workload, Mooncake):
        raise ConfigError(f"{key}._target_", section["_target_"], "has no rows of block ids; take workload=mooncake")
    return workload


def _strategies(config: DictConfig, plugins: Plugins, origin: Origin) -> dict[str, Any]:
    """By name: options of the group, the config's own where it is the option that was chosen, and what was given."""
    options = groups()[GROUP].options
    chosen = origin.choices.get(GROUP, "lru")
    policies: dict[str, Any] = {}
    for name in config.backend.policies:
        if name == BELADY:
            policies[name] = None
        elif name not in options:
            raise ConfigError("backend.policies", name, f"no such policy{close_to(name, options)}", [*options, BELADY])
        else:
            section = config.kvpool.eviction if name == chosen else OmegaConf.create(section_of(f"{GROUP}/{name}"))
            policies[name] = fit("eviction", made(config, "kvpool.eviction", section), "kvpool.eviction")
    given = plugins.get("eviction")
    if given is not None:
        policies[type(given).__name__] = given
    if not policies:
        raise ConfigError("backend.policies", "[]", "name at least one", [*options, BELADY])
    return policies


def _published_name(workload: Mooncake) -> str | None:
    """Which trace of the paper a file is, whatever it is called, if it is taken whole."""
    for name in published.TRACES:
        if PUBLISHED[f"{name}_trace.jsonl"] in workload.inputs().values():
            return name if len(workload.rows) == published.TRACE_TABLE[name][0] else None
    return None
