"""One run from end to end: a world is prepared, and a workload played through a service."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from mcjax import aio
from mcjax.backends.base import World
from mcjax.cost.slo import SLOPolicy
from mcjax.engine.cluster import Policies
from mcjax.engine.cluster_spec import InstanceSpec
from mcjax.engine.sampler import Sampler
from mcjax.engine.service import Service, Settings
from mcjax.errors import ConfigError
from mcjax.kvpool.keys import BlockNamer, KeyTable, Salts
from mcjax.sched.placement import Strategies
from mcjax.sched.state import LinkEstimate, ssd_estimate
from mcjax.track.console import Figures, ProgressDisplay
from mcjax.types import NS_PER_S, Recorder, RequestRow, RequestState, Role, Tokenizer
from mcjax.workload.base import Turn, Workload
from mcjax.workload.driver import Answer, ScriptBook, drive


@dataclass(frozen=True)
class Change:
    """An instance joins (with this role) or is drained (by this name) in mid-run."""

    at_s: float
    join: Role | None = None
    drain: str | None = None


def read_changes(entries: object, instances: Sequence[InstanceSpec]) -> list[Change]:
    """`cluster_changes` of a config, in order of time. Raises `ConfigError` for what cannot happen."""
    key, form = "cluster_changes", "write it like [{at_s: 2, join: decode}, {at_s: 5, drain: d0}]"
    if not isinstance(entries, list):
        raise ConfigError(key, entries, f"must be a list; {form}")
    changes = [_change(entry, form) for entry in cast("list[object]", entries)]
    changes.sort(key=lambda change: change.at_s)
    there = [spec.name for spec in instances]
    for change, name in zip(changes, joined_names(changes), strict=True):
        if change.join is not None:
            there.append(name)
        elif change.drain in there:
            there.remove(change.drain)
        else:
            raise ConfigError(f"{key}.drain", change.drain, f"no such instance at {change.at_s:g} s", there)
    return changes


def _change(entry: object, form: str) -> Change:
    key = "cluster_changes"
    if not isinstance(entry, dict):
        raise ConfigError(key, entry, f"must be a mapping; {form}")
    values = entry = cast("dict[str, Any]", entry)
    for name in values:
        if name not in ("at_s", "join", "drain"):
            raise ConfigError(f"{key}.{name}", values[name], "is no part of a change", ["at_s", "join", "drain"])
    at_s, join, drain = (values.get(name) for name in ("at_s", "join", "drain"))
    if isinstance(at_s, bool) or not isinstance(at_s, int | float) or not 0 <= at_s < float("inf"):
        raise ConfigError(f"{key}.at_s", at_s, "must be 0 or more seconds")
    if (join is None) == (drain is None):
        raise ConfigError(key, entry, f"needs exactly one of join and drain; {form}")
    if join is not None and join not in list(Role):
        raise ConfigError(f"{key}.join", join, "is no role", list(Role))
    return Change(at_s, None if join is None else Role(join), drain)


def joined_names(changes: Sequence[Change]) -> list[str]:
    """What the instance that joins with each change is called: `d+1`, `d+2` ...; empty for changes that drain."""
    count: dict[Role, int] = {}
    names: list[str] = []
    for change in changes:
        if change.join is not None:
            count[change.join] = count.get(change.join, 0) + 1
        names.append("" if change.join is None else f"{change.join[0]}+{count[change.join]}")
    return names


def all_instances(instances: Sequence[InstanceSpec], changes: Sequence[Change]) -> list[tuple[str, Role]]:
    """Names and roles of what is there from the beginning, then of what joins."""
    later = zip(changes, joined_names(changes), strict=True)
    there = [(spec.name, spec.role) for spec in instances]
    return there + [(name, change.join) for change, name in later if change.join is not None]


@dataclass(slots=True)
class Rehearsal:
    """Everything a run needs, made from its config (`app.build`)."""

    world: World
    workload: Workload
    scripts: ScriptBook
    instances: Sequence[InstanceSpec]
    strategies: Strategies
    policies: Policies
    slo: SLOPolicy
    settings: Settings
    salts: Salts
    table: KeyTable
    recorder: Recorder
    policy_rng: np.random.Generator
    tokenizer: Callable[[], Tokenizer] | None = None
    """What text its outputs stand for, where somebody asks."""
    changes: Sequence[Change] = ()
    sample_period_s: float = 1.0
    stall_s: float = 3600.0


@dataclass(slots=True)
class Result:
    """What is left of a run beside its tables. Rows and checksums are kept only of a run that is to be verified."""

    rows: list[RequestRow] = field(default_factory=list[RequestRow])
    duration_ns: int = 0
    bytes_by_transport: dict[str, int] = field(default_factory=dict[str, int])
    checksums: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    interrupted: bool = False
    """The user stopped it."""
    figures: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the world says of itself, for the summary."""


def live_figures(figures: Figures, before: tuple[int, int]) -> dict[str, float]:
    """What trackers draw while a run goes on. `before`: run time and output tokens at the last tick.

    Tokens count when their request ends. A share or rate that cannot be told yet is left out.
    """
    live: dict[str, float] = {
        "submitted": figures.submitted,
        "completed": figures.completed,
        "running": figures.running,
        "not_served": figures.not_served,
        "output_tokens": figures.output_tokens,
    }
    passed_ns, tokens = figures.now_ns - before[0], figures.output_tokens - before[1]
    if passed_ns > 0:
        live["output_tokens_per_s"] = tokens * NS_PER_S / passed_ns
    if figures.prompt_tokens:
        live["prefix_hit_rate"] = figures.hit_tokens / figures.prompt_tokens
    return live


def service_of(r: Rehearsal, scope: aio.Scope) -> Service:
    """The service of a rehearsed run, whose world is prepared. It lives as long as `scope`."""
    cost = r.world.cost()
    return Service(
        scope,
        r.world,
        r.world.transports(),
        cost,
        LinkEstimate(*r.world.link()),
        BlockNamer(r.world.kv_format(), r.salts, r.table),
        r.strategies,
        r.policies,
        lambda request: r.slo.bounds(request, cost),
        r.policy_rng,
        r.recorder,
        r.settings,
        r.world.keeps_tokens,
        r.world.shares_decoded,
        r.tokenizer,
        ssd_estimate(r.world.ssd()),
    )


class Performance:
    """Plays a rehearsed run once."""

    def __init__(
        self,
        rehearsal: Rehearsal,
        progress: ProgressDisplay,
        on_figures: Callable[[int, Mapping[str, float]], None],
        to_verify: bool = False,
    ):
        self._r = rehearsal
        self._to_verify = to_verify
        self._progress = progress
        self._on_figures = on_figures
        self._figures = Figures()
        self._last_tick = (0, 0)
        self.result = Result()
        self._paths: Callable[[], dict[str, Any]] = dict
        """What the summary says of the engine's paths."""

    def run(self) -> Result:
        """Play to the end. On an interrupt the result is what there was; other errors are raised."""
        try:
            self._r.world.run(self._main)
        except KeyboardInterrupt:
            self.result.interrupted = True
        finally:
            for transport in self._r.world.transports():
                self.result.bytes_by_transport[transport.name] = transport.stats().bytes_moved
            self.result.figures = {"paths": self._paths(), **self._r.world.figures()}
        return self.result

    async def _main(self) -> None:
        r = self._r
        await r.world.prepare(all_instances(r.instances, r.changes), self._progress.stage)
        try:
            async with aio.Scope("run") as scope:
                service = service_of(r, scope)
                self._paths = service.engine.figures
                aio.start_of_run()
                service.start(r.instances)
                aio.start_of_run()  # weights, programs and memory are there: time begins
                who_waits: Callable[[], str] = getattr(aio.clock(), "who_waits", lambda: "")
                sampler = Sampler(service, r.recorder, r.sample_period_s, r.stall_s, self._tick, who_waits)
                scope.spawn(sampler.run(), "sampler")
                scope.spawn(self._change(service), "cluster changes")
                await scope.run(self._drive(service))
                self.result.duration_ns = aio.now_ns()
                await service.cluster.quiesce()
                service.cluster.check_idle()
                if self._to_verify:
                    self._keep_checksums(service)
        finally:
            self.result.duration_ns = self.result.duration_ns or aio.now_ns()
            await r.world.close()

    async def _drive(self, service: Service) -> None:
        async def submit(turn: Turn) -> Answer:
            self._figures.submitted += 1
            row = await service.frontend.submit(turn.request).task
            self._count(row)
            completed = row.state is RequestState.COMPLETED
            return Answer(completed, None if row.output is None else np.array(row.output, np.int32))

        await drive(self._r.workload, submit, self._r.scripts)

    def _count(self, row: RequestRow) -> None:
        figures = self._figures
        if self._to_verify:
            self.result.rows.append(row)
        if row.state is RequestState.COMPLETED:
            figures.completed += 1
        else:
            figures.not_served += 1
        figures.output_tokens += row.output_tokens
        figures.prompt_tokens += row.request.prompt_tokens
        figures.hit_tokens += row.hit_tokens
        row.token_ends_ns = []

    def _tick(self, now_ns: int) -> None:
        figures = self._figures
        figures.now_ns = now_ns
        figures.running = figures.submitted - figures.completed - figures.not_served
        self._progress.update(figures)
        live = live_figures(figures, self._last_tick)
        self._last_tick = (now_ns, figures.output_tokens)
        self._on_figures(now_ns, live)

    async def _change(self, service: Service) -> None:
        for change, name in zip(self._r.changes, joined_names(self._r.changes), strict=True):
            await aio.sleep_until_ns(round(change.at_s * NS_PER_S))
            if change.join is not None:
                service.cluster.join(InstanceSpec(name, change.join))
            elif change.drain in service.cluster.instances:  # it may have died meanwhile
                await service.cluster.drain(change.drain)

    def _keep_checksums(self, service: Service) -> None:
        table = self._r.table
        for node in service.cluster.nodes.values():
            for block, checksum in node.pool.contents().items():
                self.result.checksums[table.key(block)] = checksum
