"""Services in the checking and the simulated world, for tests that play a few requests and look at everything after."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mcjax import aio
from mcjax.backends.check.digests import reference
from mcjax.backends.check.faults import Faults
from mcjax.backends.check.world import CheckWorld, Sizes
from mcjax.backends.sim.world import SimWorld
from mcjax.cost import catalogue
from mcjax.engine.cluster import Mechanisms, Policies, Timing
from mcjax.engine.cluster_spec import parse_cluster
from mcjax.engine.decoder import Preemption
from mcjax.engine.replication import ReplicationSettings
from mcjax.engine.service import Service, Settings
from mcjax.errors import DeadlineExceeded
from mcjax.kvpool.eviction.lru import LRU
from mcjax.kvpool.keys import BlockNamer, KeyTable, Salts
from mcjax.kvpool.watermark.static import Static as StaticWatermark
from mcjax.sched.admission.none import AdmitAll
from mcjax.sched.base import Admission
from mcjax.sched.batching.chunked import Chunked
from mcjax.sched.decode.least_loaded import LeastLoaded
from mcjax.sched.fetch.cheapest import Cheapest
from mcjax.sched.output import Listener, sampling_of
from mcjax.sched.placement import Strategies
from mcjax.sched.prefill.kvcache_centric import KVCacheCentric
from mcjax.sched.roles.static import Static
from mcjax.sched.state import PENDING_NS, LinkEstimate, ssd_estimate
from mcjax.sched.tenancy.fifo import FIFO
from mcjax.types import NS_PER_S, SLO, Decision, NullRecorder, Recorder, Request, RequestRow, Script, Tokenizer
from mcjax.workload.base import Workload
from mcjax.workload.driver import Answer, ScriptBook, drive

MS = NS_PER_S // 1000


class Rows(NullRecorder):
    """Keeps what it is given, as plain tuples."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.decisions: list[Decision] = []
        self.reports: list[tuple[Any, ...]] = []
        self.requests: list[RequestRow] = []

    def event(self, time_ns: int, kind: str, request_id: int, place: str, **values: Any) -> None:
        self.events.append((time_ns, kind, request_id, place, *values.items()))

    def decision(self, decision: Decision) -> Decision:
        self.decisions.append(decision)
        return decision

    def report(self, time_ns: int, tick_ns: int, source: str, kind: str, values: Any) -> None:
        self.reports.append((time_ns, tick_ns, source, kind, tuple(int(value) for value in values)))

    def request(self, row: RequestRow) -> None:
        self.requests.append(row)

    def decided(self, before_ns: int = 1 << 62) -> list[tuple[Any, ...]]:
        """Decisions made before a time, with everything they were made from."""
        return [
            (
                decision.time_ns,
                decision.request_id,
                decision.stage,
                decision.choice,
                decision.source,
                decision.reused_tokens,
                decision.expected_s,
                tuple(decision.names),
                tuple((name, repr(column.tolist())) for name, column in decision.candidates.items()),
            )
            for decision in self.decisions
            if decision.time_ns < before_ns
        ]


def service(
    scope: aio.Scope,
    world: Any,
    recorder: Recorder,
    settings: Settings,
    keeps_tokens: bool,
    batching_tokens: int,
    admission: Admission | None = None,
    slo: SLO = SLO(float("inf"), float("inf")),  # noqa: B008  (frozen)
    tokenizer: Callable[[], Tokenizer] | None = None,
) -> Service:
    mechanisms: Mechanisms = world
    return Service(
        scope,
        mechanisms,
        world.transports(),
        world.cost(),
        LinkEstimate(*world.link()),
        BlockNamer(world.kv_format(), Salts(), KeyTable()),
        Strategies(KVCacheCentric(1.5), LeastLoaded(), Cheapest(), admission or AdmitAll(), Static()),
        Policies(LRU, StaticWatermark, lambda: Chunked(batching_tokens), FIFO),
        lambda request: slo,
        np.random.default_rng(7),
        recorder,
        settings,
        keeps_tokens,
        share_decoded=world.shares_decoded,
        ssd=ssd_estimate(world.ssd()),
        tokenizer=tokenizer,
    )


@dataclass
class CheckBench:
    """A cluster of the checking world, without faults by itself: blocks of 4 tokens, chunks of at most 6."""

    cluster: str | Mapping[str, int]
    sizes: Sizes = field(default_factory=lambda: Sizes(chunk_tokens=6, max_batch=4))
    seed: int = 0
    max_steps: int | None = None
    attempts: int = 8
    headroom_tokens: int | None = None
    preemption: Preemption = "swap"
    timeout_s: float | None = None
    hbm_cache: bool = False
    streaming: bool = True
    replication: ReplicationSettings = field(default_factory=ReplicationSettings)
    faults: Faults = field(default_factory=Faults)
    shares_decoded: bool = True
    look: Callable[[Service], None] = lambda service: None
    """Looks at everything, every millisecond."""
    tokenizer: Callable[[], Tokenizer] | None = None
    rows: Rows = field(default_factory=Rows)
    book: ScriptBook = field(default_factory=ScriptBook)
    world: CheckWorld = field(init=False)

    def run(self, main: Callable[[Service], Coroutine[Any, Any, None]]) -> None:
        """Run `main`; afterwards nothing may be held by anybody, at any time slots and pins must add up."""
        world = self.world = CheckWorld(self.sizes, self.book, self.faults, np.random.default_rng(self.seed))
        world.shares_decoded = self.shares_decoded
        settings = Settings(
            report_period_s=0.01,
            attempts=self.attempts,
            transfer_deadline_s=0.2,
            headroom_tokens=self.headroom_tokens,
            preemption=self.preemption,
            timeout_s=self.timeout_s,
            max_steps=self.max_steps,
            hbm_cache=self.hbm_cache,
            streaming=self.streaming,
            replication=self.replication,
            timing=Timing(lease_s=0.3, wait_s=1.0, detect_s=0.02),
        )

        async def body() -> None:
            async with aio.Scope("test") as scope:
                made = service(scope, world, self.rows, settings, True, 6, tokenizer=self.tokenizer)
                made.start(parse_cluster(self.cluster))
                scope.spawn(self._audit(made), "audit")
                work = aio.spawn(scope.run(main(made)), "work")
                try:
                    await aio.within(100 * NS_PER_S, work)
                except DeadlineExceeded:
                    raise AssertionError(f"hanging: {world.loop.who_waits()}") from None
                finally:
                    await aio.settle(work)
                await made.cluster.quiesce()
                await aio.sleep_ns(NS_PER_S)  # longer than a lease
                made.cluster.check_idle()
                assert not made.conductor.state._columns[PENDING_NS:].any()
                assert not made.conductor.state._assignments
                assert not made.frontend.running
                for instance in made.cluster.instances.values():
                    assert instance.jobs == 0
                    assert instance._queue_ns == 0
                    assert instance.loop.context_tokens == 0
                    loop = instance.loop
                    assert not [*loop.prefills, *loop.decodes, *loop.waiting_decodes]

        world.run(body)

    async def _audit(self, made: Service) -> None:
        while True:
            await aio.sleep_ns(MS)
            made.cluster.check_integrity()
            self.look(made)

    def request(
        self, request_id: int, prompt: Sequence[int], output_tokens: int, max_tokens: int = 12, **values: Any
    ) -> Request:
        """A request, whose hidden future goes into the book."""
        tokens = np.array(prompt, np.int32)
        self.book.put(request_id, Script(output_tokens))
        return Request(request_id, 0, len(tokens), max_tokens, tokens=tokens, **values)


def expected(request: Request, output_tokens: int, output: int = 0) -> list[int]:
    """What the checking world must produce."""
    assert request.tokens is not None
    return reference(request.tokens, output_tokens, sampling_of(request.sampling, output))


def simulate(
    workload: Workload,
    cluster: str,
    max_steps: int | None = None,
    chunk: int = 2048,
    memory_share: float = 0.9,
    headroom_tokens: int | None = None,
    pool_bytes: int | None = None,
    admission: Admission | None = None,
    slo: SLO = SLO(float("inf"), float("inf")),  # noqa: B008  (frozen)
    patience_s: Mapping[int, float] | None = None,
    preemption: Preemption = "swap",
    listener: Listener | None = None,
    hbm_cache: bool = False,
    streaming: bool = True,
) -> Rows:
    """Play a workload on LLaMA3-70B instances of the simulated world, and keep every row.

    The client of a request in `patience_s` goes away so long after it sent it.
    """
    rows, book = Rows(), ScriptBook()
    world = SimWorld(
        catalogue.model("llama3-70b"),
        catalogue.hardware("a800x8"),
        catalogue.fitted(),
        book,
        64,
        chunk,
        max_batch=8,
        memory_share=memory_share,
        pool_bytes=pool_bytes,
    )
    settings = Settings(
        max_steps=max_steps,
        headroom_tokens=headroom_tokens,
        preemption=preemption,
        hbm_cache=hbm_cache,
        streaming=streaming,
    )

    async def body() -> None:
        async with aio.Scope("test") as scope:
            made = service(scope, world, rows, settings, world.keeps_tokens, 512, admission, slo)
            made.start(parse_cluster(cluster))

            async def submit(turn: Any) -> Answer:
                ticket = made.frontend.submit(turn.request, listener)
                patience = (patience_s or {}).get(turn.request.request_id)
                if patience is not None:
                    aio.clock().call_at_ns(aio.now_ns() + round(patience * NS_PER_S), ticket.cancel)
                row = await ticket.task
                output = None if row.output is None else np.array(row.output, np.int32)
                return Answer(str(row.state) == "completed", output)

            await scope.run(drive(workload, submit, book))
            made.cluster.check_idle()

    world.run(body)
    return rows


def futures(count: int) -> list[asyncio.Future[Any]]:
    return [asyncio.get_running_loop().create_future() for _ in range(count)]
