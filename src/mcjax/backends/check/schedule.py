"""One seeded schedule: a small cluster, a small workload, faults; then everything that must hold is checked."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mcjax import aio
from mcjax.backends.check.digests import reference
from mcjax.backends.check.executor import BROKEN
from mcjax.backends.check.faults import Faults, timed_faults
from mcjax.backends.check.world import CheckWorld, Sizes
from mcjax.engine.cluster import Policies, Timing
from mcjax.engine.cluster_spec import InstanceSpec, parse_cluster
from mcjax.engine.service import Service, Settings
from mcjax.errors import DeadlineExceeded, Deadlock, ExecutorFailed, IntegrityError
from mcjax.kvpool.holds import Hold
from mcjax.kvpool.keys import BlockNamer, KeyTable, Salts
from mcjax.kvpool.pool import Pool
from mcjax.sched.placement import Strategies
from mcjax.sched.state import LinkEstimate
from mcjax.types import NS_PER_S, SLO, Recorder, RequestRow, RequestState, Role
from mcjax.workload.base import Turn, Workload
from mcjax.workload.driver import Answer, ScriptBook, drive
from mcjax.workload.synthetic import Synthetic

HORIZON_S = 400.0
"""Virtual time by which a schedule must have ended: many times what it takes."""

BUSY_S = 20
"""Most of what happens in a schedule happens before this."""

SETTLE_S = 5.0
"""Longer than any lease, late copy or transport's patience."""

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
        sessions=int(rng.integers(3, 9)),
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
        think_time_s=0.05,
        vocab_size=50,
        few_shot_tokens=int(rng.integers(0, 9)),
    )


MOST_TOKENS = 132
"""Longest prompt and output that a drawn workload can come to."""


def draw_sizes(rng: np.random.Generator) -> Sizes:
    return Sizes(
        pages=int(rng.integers(MOST_TOKENS // 4, 56)),
        pool_blocks=int(rng.integers(40, 120)),
        max_batch=int(rng.integers(1, 6)),
        chunk_tokens=int(rng.integers(1, 20)),
    )


def run_schedule(seed: int, faults: Faults, parts: Parts, cluster: str | None = None) -> Outcome:
    """Run the schedule of `seed`; the same seed gives the same schedule, event for event."""
    shape, world_rng, fault_rng, policy_rng = (np.random.default_rng([seed, stream]) for stream in range(4))
    name = cluster or str(shape.choice(CLUSTERS))
    book = ScriptBook()
    headroom = [None, 1, 4][int(shape.integers(3))]
    world = CheckWorld(draw_sizes(shape), book, faults, world_rng)
    run = _Schedule(
        Outcome(seed, name), world, book, draw_workload(shape), faults, parts, fault_rng, policy_rng, headroom
    )
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
        headroom_tokens: int | None,
    ):
        self._headroom_tokens = headroom_tokens
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
            self._lose_heartbeats(service)
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
            Settings(
                report_period_s=0.01,
                attempts=40,
                transfer_deadline_s=0.2,
                headroom_tokens=self._headroom_tokens,
                timing=Timing(lease_s=0.3, wait_s=1.0, detect_s=0.05),
            ),
            keeps_tokens=True,
            share_decoded=world.shares_decoded,
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
            self._world.counts.note(fault.kind)
            if fault.kind == "stale_view":
                service.bus.delay_ns = round(fault.value * 0.2 * NS_PER_S)
            else:
                self._lose_one(service, fault.value, fault.kind)

    def _lose_one(self, service: Service, value: float, kind: str) -> None:
        """Kill an instance, or have its executor lose its pages; one of its kind comes up a little later."""
        cluster = service.cluster
        names = list(cluster.instances)
        if not names:
            return
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
        self._lose_heartbeats_of(cluster.nodes[f"node-{name}"].pool)

    def _lose_heartbeats(self, service: Service) -> None:
        for node in service.cluster.nodes.values():
            self._lose_heartbeats_of(node.pool)

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
