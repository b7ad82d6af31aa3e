"""One seeded schedule: a small cluster, a small workload, faults; then everything that must hold is checked."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from mcjax import aio
from mcjax.backends.check.digests import reference
from mcjax.backends.check.executor import BROKEN
from mcjax.backends.check.faults import Faults, TimedFault, timed_faults
from mcjax.backends.check.world import CheckWorld, Sizes
from mcjax.engine.cluster import Policies, Timing
from mcjax.engine.cluster_spec import InstanceSpec, parse_cluster
from mcjax.engine.saving import Saving
from mcjax.engine.service import Service, Settings
from mcjax.errors import DeadlineExceeded, Deadlock, ExecutorFailed, IntegrityError
from mcjax.kvpool.base import Eviction, Tiering, Watermark
from mcjax.kvpool.eviction.cost_aware import CostAware
from mcjax.kvpool.eviction.fifo import FIFO
from mcjax.kvpool.eviction.length_aware import LengthAware
from mcjax.kvpool.eviction.lfu import LFU
from mcjax.kvpool.eviction.lru import LRU
from mcjax.kvpool.eviction.s3fifo import S3FIFO
from mcjax.kvpool.eviction.sieve import Sieve
from mcjax.kvpool.holds import Hold
from mcjax.kvpool.keys import BlockNamer, KeyTable, Salts
from mcjax.kvpool.pool import Pool
from mcjax.kvpool.quotas import Quota
from mcjax.kvpool.tiering.on_evict import OnEvict
from mcjax.kvpool.tiering.write_back import WriteBack
from mcjax.kvpool.tiering.write_through import WriteThrough
from mcjax.kvpool.watermark.adaptive import Adaptive
from mcjax.kvpool.watermark.static import Static as StaticWatermark
from mcjax.sched.placement import Strategies
from mcjax.sched.state import LinkEstimate, ssd_estimate
from mcjax.transfer.paths.base import PathChoice
from mcjax.transfer.paths.least_queued import LeastQueued
from mcjax.transfer.paths.nearest import Nearest
from mcjax.transfer.paths.striped import Striped
from mcjax.types import NS_PER_S, SLO, BlockId, Recorder, RequestRow, RequestState, Role
from mcjax.workload.base import Turn, Workload
from mcjax.workload.driver import Answer, ScriptBook, drive
from mcjax.workload.synthetic import Synthetic

HORIZON_S = 400.0
"""Virtual time by which a schedule must have ended: many times what it takes."""

BUSY_S = 20
"""Most of what happens in a schedule happens before this."""

SETTLE_S = 5.0
"""Longer than any lease, late copy or transport's patience."""

EVICTIONS: tuple[Callable[[], Eviction], ...] = (LRU, LFU, FIFO, S3FIFO, Sieve, LengthAware, CostAware)

CLUSTERS = ("1p1d", "2p1d", "1p2d", "2p2d", "3p2d", "2m", "3m", "1p1d+1m", "2p1d+1m")


@dataclass(slots=True)
class Outcome:
    """What one schedule showed. `problems` is empty when all is well."""

    seed: int
    cluster: str
    requests: int = 0
    states: dict[str, int] = field(default_factory=dict[str, int])
    faults: dict[str, int] = field(default_factory=dict[str, int])
    problems: list[str] = field(default_factory=list[str])
    virtual_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Parts:
    """What a schedule takes from outside: strategies made afresh for it, and places to break things on purpose."""

    strategies: Callable[[], Strategies]
    policies: Policies
    recorder: Callable[[KeyTable], Recorder]
    sabotage: Callable[[Service, CheckWorld], None] = lambda service, world: None


def draw_workload(rng: np.random.Generator) -> Synthetic:
    """A few short sessions of two tenants, with shared prefixes, often more than the cluster can hold at once."""
    return Synthetic(
        seed=int(rng.integers(1 << 31)),
        sessions=int(rng.integers(3, 14)),
        tenants={
            "a": {"share": 0.6, "priority": 1, "system_prompt_tokens": int(rng.integers(1, 14))},
            "b": {"share": 0.4, "priority": 0, "system_prompt_tokens": int(rng.integers(1, 14))},
        },
        turns=(1, 3),
        first_prompt_tokens=(1, 24),
        user_tokens=(1, 10),
        output_tokens=(1, 20),
        max_tokens=24,
        rate_per_s=float(rng.choice([5.0, 50.0, 500.0])),
        think_time_s=float(rng.choice([0.05, 0.5])),
        vocab_size=50,
        few_shot_tokens=int(rng.integers(0, 9)),
    )


MOST_TOKENS = 132
"""Longest prompt and output that a drawn workload can come to."""


def draw_sizes(rng: np.random.Generator) -> Sizes:
    """Two in three have an SSD, sometimes one that holds less than the host memory above it."""
    has_ssd = rng.random() < 0.67
    return Sizes(
        pages=int(rng.integers(MOST_TOKENS // 4, 56)),
        pool_blocks=int(rng.integers(MOST_TOKENS // 4 + 2, 50 if has_ssd else 100)),
        max_batch=int(rng.integers(1, 6)),
        chunk_tokens=int(rng.integers(1, 20)),
        ssd_blocks=int(rng.integers(10, 160)) if has_ssd else None,
    )


def draw_policies(rng: np.random.Generator, configured: Policies) -> Policies:
    """Half of all schedules have an eviction and a tiering of their own; the others what is configured."""
    if rng.random() < 0.5:
        return configured
    exclusive = bool(rng.random() < 0.5)
    tierings: list[Callable[[], Tiering]] = [
        partial(WriteThrough, 0, exclusive),
        partial(WriteThrough, int(rng.integers(1, 3)), exclusive),
        partial(WriteBack, float(rng.uniform(0, 1)), exclusive),
        partial(OnEvict, exclusive),
    ]
    eviction = EVICTIONS[int(rng.integers(len(EVICTIONS)))]
    return replace(configured, eviction=eviction, tiering=tierings[int(rng.integers(len(tierings)))])


def draw_room(rng: np.random.Generator, sizes: Sizes, policies: Policies) -> Policies:
    """One in three has shares for its tenants, as far as the longest request still fits beside them; one in three a
    watermark of its own."""
    if rng.random() < 0.33:
        least = min(1.0, (MOST_TOKENS // 4 + 3) / sizes.pool_blocks)
        ceilings = rng.uniform(least, 1.0, 2).tolist()
        floors = rng.uniform(0.0, (1.0 - least) / 2, 2).tolist()
        quotas = {
            tenant: Quota(min(floor, ceiling), ceiling)
            for tenant, floor, ceiling in zip("ab", floors, ceilings, strict=True)
        }
        policies = replace(policies, quotas=quotas)
    if rng.random() < 0.33:
        level = float(rng.uniform(0.5, 1.0))
        watermarks: list[Callable[[], Watermark]] = [Adaptive, partial(StaticWatermark, level, level)]
        policies = replace(policies, watermark=watermarks[int(rng.integers(2))])
    return policies


PATH_CHOICES: tuple[PathChoice, ...] = (Nearest(), Striped(stripe_bytes=1), LeastQueued(stripe_bytes=1))


def draw_paths(rng: np.random.Generator) -> tuple[int, PathChoice]:
    """How many NICs each node has, one in half of all schedules, and which of them a copy takes, block by block."""
    nics = 1 if rng.random() < 0.5 else int(rng.integers(2, 4))
    return nics, PATH_CHOICES[int(rng.integers(len(PATH_CHOICES)))]


def run_schedule(seed: int, faults: Faults, parts: Parts, cluster: str | None = None) -> Outcome:
    """Run the schedule of `seed`; the same seed gives the same schedule, event for event."""
    streams = [np.random.default_rng([seed, stream]) for stream in range(6)]
    shape, world_rng, fault_rng, policy_rng, room, network = streams
    name = cluster or str(shape.choice(CLUSTERS))
    book = ScriptBook()
    headroom = [None, 1, 4][int(shape.integers(3))]
    nics, path_choice = draw_paths(network)
    sizes = replace(draw_sizes(shape), nics=nics)
    world = CheckWorld(sizes, book, faults, world_rng)
    workload = draw_workload(shape)
    parts = replace(parts, policies=draw_room(room, sizes, draw_policies(shape, parts.policies)))
    settings = Settings(
        report_period_s=0.01,
        attempts=40,
        transfer_deadline_s=0.2,
        path_choice=path_choice,
        headroom_tokens=headroom,
        timing=Timing(lease_s=0.3, wait_s=1.0, detect_s=0.05, tier_s=0.3),
        hbm_cache=bool(shape.random() < 0.5),
        streaming=bool(shape.random() < 0.75),
    )
    run = _Schedule(Outcome(seed, name), world, book, workload, faults, parts, fault_rng, policy_rng, settings)
    try:
        world.run(run.main)
    except Deadlock as problem:
        run.outcome.problems.append(f"deadlock: {problem}")
    except IntegrityError as problem:
        run.outcome.problems.append(f"integrity: {problem}")
    except Exception as problem:  # a schedule that crashes is a finding like any other, and the campaign goes on
        last = traceback.extract_tb(problem.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        run.outcome.problems.append(f"crash: {type(problem).__name__} at {where}: {problem}")
    run.outcome.faults = dict(world.counts.counts)
    run.outcome.virtual_s = world.loop.now_ns() / NS_PER_S
    return run.outcome


class _Schedule:
    def __init__(
        self,
        outcome: Outcome,
        world: CheckWorld,
        book: ScriptBook,
        workload: Workload,
        faults: Faults,
        parts: Parts,
        fault_rng: np.random.Generator,
        policy_rng: np.random.Generator,
        settings: Settings,
    ):
        self._settings = settings
        self.outcome = outcome
        self._world = world
        self._book = book
        self._workload = workload
        self._faults = faults
        self._parts = parts
        self._rng = fault_rng
        self._policy_rng = policy_rng
        self._ended: dict[int, int] = {}

    async def main(self) -> None:
        async with aio.Scope("schedule") as scope:
            service = self._service(scope)
            service.start(parse_cluster(self.outcome.cluster))
            self._parts.sabotage(service, self._world)
            for name in service.cluster.nodes:
                self._watch(service, name)
            scope.spawn(self._disturb(service), "disturbances")
            scope.spawn(self._audit(service), "audit")
            work = aio.spawn(scope.run(self._drive(service)), "workload")
            try:
                await aio.within(round(HORIZON_S * NS_PER_S), work)
            except DeadlineExceeded:
                self.outcome.problems.append(f"hanging: {self._world.loop.who_waits()}")
                return
            finally:
                await aio.settle(work)
            await aio.sleep_ns(round(SETTLE_S * NS_PER_S))
            await service.cluster.quiesce()
            service.cluster.check_idle()
            self._count_ends()

    def _service(self, scope: aio.Scope) -> Service:
        world = self._world
        table = KeyTable()
        return Service(
            scope,
            world,
            world.transports(),
            world.cost(),
            LinkEstimate(*world.link()),
            BlockNamer(world.kv_format(), Salts(), table),
            self._parts.strategies(),
            self._parts.policies,
            lambda request: SLO(float("inf"), float("inf")),
            self._policy_rng,
            self._parts.recorder(table),
            self._settings,
            keeps_tokens=True,
            share_decoded=world.shares_decoded,
            ssd=ssd_estimate(world.ssd()),
        )

    async def _drive(self, service: Service) -> None:
        async def submit(turn: Turn) -> Answer:
            request = turn.request
            self.outcome.requests += 1
            ticket = service.frontend.submit(request)
            if self._rng.random() < self._faults.cancelled:
                self._world.counts.note("cancelled")
                when_ns = aio.now_ns() + round(float(self._rng.exponential(0.03)) * NS_PER_S)
                aio.clock().call_at_ns(when_ns, ticket.cancel)
            row = await ticket.task
            self._judge(turn, row)
            tokens = None if row.output is None else np.array(row.output, np.int32)
            return Answer(row.state is RequestState.COMPLETED, tokens)

        await drive(self._workload, submit, self._book)

    def _judge(self, turn: Turn, row: RequestRow) -> None:
        request = turn.request
        self._ended[request.request_id] = self._ended.get(request.request_id, 0) + 1
        self.outcome.states[row.state] = self.outcome.states.get(row.state, 0) + 1
        if row.state is RequestState.FAILED and not (BROKEN in row.reason and self._faults.broken):
            self.outcome.problems.append(f"lost: request {request.request_id}: {row.reason}")
            return
        assert request.tokens is not None
        assert row.output is not None
        length = turn.script.output_tokens if row.state is RequestState.COMPLETED else max(1, len(row.output))
        expected = reference(request.tokens, length)[: len(row.output)] if row.output else []
        if row.state is RequestState.COMPLETED and len(row.output) != length:
            self.outcome.problems.append(f"short: request {request.request_id}: {len(row.output)} of {length} tokens")
        if row.output != expected:
            self.outcome.problems.append(f"wrong: request {request.request_id}: {row.output}, must be {expected}")

    def _count_ends(self) -> None:
        twice = [request for request, count in self._ended.items() if count != 1]
        if twice:
            self.outcome.problems.append(f"requests {twice} ended more than once")
        if len(self._ended) != self.outcome.requests:
            self.outcome.problems.append(f"{self.outcome.requests} requests came, {len(self._ended)} ended")

    async def _audit(self, service: Service) -> None:
        """Everything must add up at all times, not only at the end."""
        pause_ns = NS_PER_S // 20
        while True:
            await aio.sleep_ns(pause_ns)
            service.cluster.check_integrity()
            if aio.now_ns() > BUSY_S * NS_PER_S:
                pause_ns = NS_PER_S  # by now something hangs, and nothing changes

    async def _disturb(self, service: Service) -> None:
        for fault in timed_faults(self._faults, 1.0, self._rng):
            await aio.sleep_until_ns(round(fault.at_s * NS_PER_S))
            if fault.kind == "stale_view":
                self._world.counts.note(fault.kind)
                service.bus.delay_ns = round(fault.value * 0.2 * NS_PER_S)
            elif fault.kind in ("rotten", "ssd_outage"):
                self._harm_disk(fault)
            elif fault.kind == "nic_outage":
                self._cut_off(service, fault)
            else:
                self._lose_one(service, fault.value, fault.kind)

    def _cut_off(self, service: Service, fault: TimedFault) -> None:
        """A NIC of a node that has several is down for a while."""
        network, nodes = self._world.network, list(service.cluster.nodes)
        if network is None or not nodes:
            return
        nics = [f"{node}/{nic.name}" for node in nodes for nic in network.topology.nics]
        self._world.counts.note(fault.kind)
        duration_s = self._rng.uniform(0.05, 0.5)
        network.nic_outages_ns[nics[int(fault.value * len(nics))]] = aio.now_ns() + round(duration_s * NS_PER_S)

    def _harm_disk(self, fault: TimedFault) -> None:
        """A bit is flipped where a block rests on an SSD, or all that is asked of that fails for a while."""
        disks = [(name, disk) for name, disk in self._world.disks.items() if disk.left is None and disk.resting()]
        if not disks:
            return
        name, disk = disks[int(fault.value * len(disks))]
        self._world.counts.note(fault.kind)
        if fault.kind == "ssd_outage":
            self._world.outages_ns[name] = aio.now_ns() + round(self._rng.uniform(0.05, 0.5) * NS_PER_S)
            return
        slots = disk.resting()
        slot = slots[int(self._rng.integers(len(slots)))]
        disk.buffer()[slot, int(self._rng.integers(disk.block_bytes))] ^= 1 << int(self._rng.integers(8))

    def _lose_one(self, service: Service, value: float, kind: str) -> None:
        """Kill an instance, or have its executor lose its pages; one of its kind comes up a little later."""
        cluster = service.cluster
        names = list(cluster.instances)
        if not names:
            return
        self._world.counts.note(kind)
        victim = cluster.instances[names[int(value * len(names))]]
        if kind == "death":
            cluster.kill(victim.name)
        else:
            problem = ExecutorFailed("RuntimeError: injected", lost_pages=True)
            self._world.executors[victim.name].problem = problem
        successor = InstanceSpec(f"{victim.name}'", Role(victim.role))
        back_ns = aio.now_ns() + round(0.1 * NS_PER_S)
        aio.clock().call_at_ns(back_ns, self._join, service, successor)

    def _join(self, service: Service, spec: InstanceSpec) -> None:
        cluster, name = service.cluster, spec.name
        while name in cluster.nodes or f"node-{name}" in cluster.nodes:
            name += "'"
        cluster.join(replace(spec, name=name))
        self._watch(service, f"node-{name}")

    def _watch(self, service: Service, name: str) -> None:
        """A node has come: it will miss heartbeats, and nothing shall leave it unsaved."""
        self._lose_heartbeats_of(service.cluster.nodes[name].pool)
        saving = service.cluster.savings.get(name)
        if saving is not None:
            saving.tier.span_blocks = int(self._rng.integers(1, 9))  # so that a chain takes several moves
            self._watch_leaving(saving)

    def _watch_leaving(self, saving: Saving) -> None:
        """What must be saved before it leaves is below when it leaves, unless the tier below could not take it."""
        node, room = saving.node, saving.node.pool.room
        leaving = room.leaving

        def watched(count: int, tenant: str) -> list[BlockId]:
            victims = leaving(count, tenant)
            assert node.ssd is not None
            lost = [block for block in victims if block not in node.ssd and not saving.excused(block)]
            if saving.tiering.must_save and lost:
                self.outcome.problems.append(f"unsaved: {node.name} let block {lost[0]} go, which is nowhere below")
            return victims

        room.leaving = watched

    def _lose_heartbeats_of(self, pool: Pool) -> None:
        if self._faults.missed == 0.0:
            return
        renew = pool.renew

        def sometimes(hold: Hold) -> None:
            if self._rng.random() < self._faults.missed:
                self._world.counts.note("missed")
            else:
                renew(hold)

        pool.renew = sometimes  # a heartbeat is a message, and messages get lost
