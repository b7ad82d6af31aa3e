"""The conductor in virtual time, with instances that do as they are told: retries, deaths, cancels, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from sched_fixtures import COST, request

from mcjax import aio
from mcjax.backends.virtual import VirtualLoop
from mcjax.errors import (
    BlockCorrupt,
    ExecutorFailed,
    InstanceDown,
    LeaseLost,
    PoolFull,
    Preempted,
    RecordMismatch,
    Rejected,
    RequestFailed,
    RequestTooLarge,
    StaleRegion,
    TransferError,
)
from mcjax.kvpool.eviction.lru import LRU
from mcjax.kvpool.holds import Pin, Reservation
from mcjax.kvpool.pool import Pool
from mcjax.kvpool.stores.slots import SlotStore
from mcjax.kvpool.watermark.static import Static as StaticWatermark
from mcjax.sched.admission.early_rejection import EarlyRejection
from mcjax.sched.admission.none import AdmitAll
from mcjax.sched.base import Admission, PrefillChoice
from mcjax.sched.conductor import RETRYABLE, Conductor
from mcjax.sched.decode.least_loaded import LeastLoaded
from mcjax.sched.fetch.cheapest import Cheapest
from mcjax.sched.job import CompletionRecord, Job, Placement, SamplerState
from mcjax.sched.output import Output
from mcjax.sched.placement import Strategies
from mcjax.sched.prefill.kvcache_centric import KVCacheCentric
from mcjax.sched.reports import ReportBus
from mcjax.sched.roles.static import Static
from mcjax.sched.state import PENDING_NS, ClusterState, LinkEstimate
from mcjax.sched.view import ClusterView
from mcjax.types import NS_PER_S, SLO, Decision, NullRecorder, Request, RequestRow, Role, Tier

MS = NS_PER_S // 1000

PROBLEMS: list[Callable[[], Exception]] = [
    lambda: TransferError("lost"),
    lambda: StaleRegion("changed hands"),
    lambda: BlockCorrupt("checksum differs"),
    lambda: LeaseLost("node", 1),
    lambda: InstanceDown("p0"),
    lambda: ExecutorFailed("MemoryError: no room"),
    lambda: PoolFull("node", 3, 0),
    lambda: RecordMismatch(1, "of another request"),
]


class Log(NullRecorder):
    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.journal: list[tuple[str, list[int]]] = []
        self.retries: list[int] = []

    def decision(self, decision: Decision) -> Decision:
        self.decisions.append(decision)
        return decision

    def report(self, time_ns: int, tick_ns: int, source: str, kind: str, values: Any) -> None:
        if source == "conductor":
            self.journal.append((kind.split(maxsplit=1)[0], [int(value) for value in values]))

    def event(self, time_ns: int, kind: str, request_id: int, place: str, **_: Any) -> None:
        if kind == "retry":
            self.retries.append(time_ns)


@dataclass(eq=False)
class Fake:
    """An instance whose procedures are whatever the test says; it counts who is inside."""

    name: str
    number: int
    pool: Pool
    on_prefill: Callable[[Job], Awaitable[None]]
    on_decode: Callable[[Job], Awaitable[None]]
    down: asyncio.Future[None]
    receiver: Pool | None = None
    ends_output: bool = False
    inside: int = 0
    calls: int = 0

    async def prefill(self, job: Job, placement: Placement) -> CompletionRecord:
        self.calls += 1
        self.inside += 1
        pool = self.receiver or self.pool
        pin: Pin | None = None
        tail: Reservation | None = None
        handed_over = False
        try:
            pin, tail = pool.pin(job.request_id, ()), pool.reserve(job.request_id, 1)
            await self.on_prefill(job)
            job.first.emit(0, None, np.array([aio.now_ns()], np.int64))
            handed_over = True
            if self.ends_output:
                job.first.end("stop")
            sampler = SamplerState(0, job.request.prompt_tokens + 1, 1, None)
            return CompletionRecord(job.request_id, (), (), job.request.prompt_tokens, sampler, pin, tail)
        finally:
            self.inside -= 1
            if not handed_over:
                for hold in (pin, tail):
                    if hold is not None:
                        pool.release(hold)

    async def decode(self, job: Job, record: CompletionRecord) -> None:
        self.calls += 1
        self.inside += 1
        try:
            await self.on_decode(job)
            job.first.emit(1, None, np.array([aio.now_ns()], np.int64))
        finally:
            self.inside -= 1

    async def serve(self, job: Job, placement: Placement) -> None:
        self.calls += 1
        self.inside += 1
        try:
            await self.on_prefill(job)
            job.first.emit(0, None, np.array([aio.now_ns()], np.int64))
        finally:
            self.inside -= 1


async def soon(job: Job) -> None:
    await aio.sleep_ns(MS)


async def never(job: Job) -> None:
    await asyncio.get_running_loop().create_future()


@dataclass
class House:
    """A conductor with fakes; `p0` and `d0` to begin with."""

    admission: Admission = field(default_factory=AdmitAll)
    attempts: int = 4
    log: Log = field(default_factory=Log)
    instances: dict[str, Fake] = field(default_factory=dict[str, Fake])

    def open(self, *names: str) -> House:
        self.bus = ReportBus(NS_PER_S // 10)
        self.state = ClusterState(COST, LinkEstimate(1e6, 0.0), 1, 100)
        strategies = Strategies(KVCacheCentric(), LeastLoaded(), Cheapest(), self.admission, Static())
        self.conductor = Conductor(self.state, strategies, self.bus, np.random.default_rng(0), self.log, self.attempts)
        for name in names:
            self.join(name)
        return self

    def join(self, name: str) -> Fake:
        role = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}[name[0]]
        node = f"node-{name}"
        pool = Pool(node, SlotStore(node, Tier.DRAM, 8, 1), LRU(), StaticWatermark(), NullRecorder(), NS_PER_S)
        fake = Fake(name, self.bus.join(), pool, soon, soon, asyncio.get_running_loop().create_future())
        self.instances[name] = fake
        if role is Role.PREFILL and "d0" in self.instances:
            fake.receiver = self.instances["d0"].pool
        self.conductor.join(fake, node, role, pool, 10_000)
        return fake

    def job(self, request_id: int = 1, slo: SLO | None = None) -> Job:
        asked = request(1000, request_id)
        slo = slo or SLO(float("inf"), float("inf"))
        return Job(asked, (), slo, RequestRow(asked), [Output.of(asked, 0, keeps_tokens=False)])

    def check_empty(self) -> None:
        """Nobody is inside, nothing is held, nothing is pending."""
        for fake in self.instances.values():
            assert fake.inside == 0
            fake.pool.check_integrity()
            fake.pool.check_idle()
        assert not self.state._columns[PENDING_NS:].any()
        assert not self.state._assignments


def virtual(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    VirtualLoop().run(main)


def failing(times: int, problem: Callable[[], Exception]) -> Callable[[Job], Awaitable[None]]:
    left = [times]

    async def work(job: Job) -> None:
        await aio.sleep_ns(MS)
        if left[0]:
            left[0] -= 1
            raise problem()

    return work


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("stage", ["prefill", "decode", "mixed"])
def test_a_failure_of_a_place_is_tried_again(problem: Callable[[], Exception], stage: str) -> None:
    assert isinstance(problem(), RETRYABLE)

    async def main() -> None:
        house = House().open(*(["m0"] if stage == "mixed" else ["d0", "p0"]))
        if stage == "decode":
            house.instances["d0"].on_decode = failing(2, problem)
        else:
            house.instances["m0" if stage == "mixed" else "p0"].on_prefill = failing(2, problem)
        job = house.job()
        await house.conductor.serve(job)
        assert job.row.attempts == 3
        assert job.produced == (1 if stage == "mixed" else 2), "tokens of an attempt before are not given twice"
        assert [decision.outcome for decision in house.log.decisions if decision.stage == "prefill"] == [
            type(problem()).__name__,
            type(problem()).__name__,
            "completed",
        ]
        house.check_empty()

    virtual(main)


@pytest.mark.parametrize("stage", ["decode", "mixed"])
def test_making_room_is_no_failed_attempt(stage: str) -> None:
    """However often: it is placed again at once, and admission is not asked again as if it arrived."""

    async def main() -> None:
        house = House(attempts=1).open(*(["m0"] if stage == "mixed" else ["d0", "p0"]))
        work = failing(5, lambda: Preempted(1, "d0"))
        if stage == "decode":
            house.instances["d0"].on_decode = work
        else:
            house.instances["m0"].on_prefill = work
        job = house.job()
        await house.conductor.serve(job)
        assert job.row.attempts == 6
        assert not house.log.retries
        assert aio.now_ns() <= 12 * MS, "no pause"
        house.check_empty()

    virtual(main)


def test_a_job_lost_after_its_last_token_is_complete() -> None:
    """What was lost can only have been the writing back."""

    async def main() -> None:
        house = House().open("d0", "p0")

        async def end(job: Job) -> None:
            job.first.end("length")
            raise TransferError("lost")

        house.instances["d0"].on_decode = end
        job = house.job()
        await house.conductor.serve(job)
        assert house.instances["p0"].calls == 1
        house.check_empty()

    virtual(main)


@pytest.mark.parametrize("attempts", [1, 3])
def test_it_gives_up_after_its_attempts_and_says_why_at_once(attempts: int) -> None:
    async def main() -> None:
        house = House(attempts=attempts).open("d0", "p0")
        house.instances["p0"].on_prefill = failing(99, lambda: PoolFull("node-p0", 3, 0))
        with pytest.raises(RequestFailed, match=rf"request 1: gave up after {attempts}.*3 blocks needed"):
            await house.conductor.serve(house.job())
        assert house.instances["p0"].calls == attempts
        assert len(house.log.retries) == attempts
        assert aio.now_ns() == house.log.retries[-1], "no pause behind the last attempt"
        house.check_empty()

    virtual(main)


def test_what_no_retry_helps_is_not_tried_again() -> None:
    async def main() -> None:
        house = House().open("d0", "p0")
        house.instances["p0"].on_prefill = failing(99, lambda: RequestTooLarge(1, "too long"))
        with pytest.raises(RequestTooLarge):
            await house.conductor.serve(house.job())
        assert house.instances["p0"].calls == 1
        house.check_empty()

    virtual(main)


def test_nobody_there_is_a_typed_error_and_a_late_comer_is_used() -> None:
    async def main() -> None:
        house = House().open("p0")
        with pytest.raises(RequestFailed, match="no instance decodes"):
            await house.conductor.serve(house.job())
        task = aio.spawn(house.conductor.serve(house.job(2)), "late")
        await aio.sleep_ns(MS)
        house.join("d0")
        await task
        house.check_empty()

    virtual(main)


@pytest.mark.parametrize("victim", ["p0", "d0", "m0"])
def test_who_waits_for_the_dead_is_told_at_once_and_served_elsewhere(victim: str) -> None:
    """A dead half must not leave the other waiting (nor the client): the call ends in the instant of `leave`."""

    async def main() -> None:
        house = House().open(*(["m0", "m1"] if victim == "m0" else ["d0", "d1", "p0", "p1"]))
        fake = house.instances[victim]
        fake.on_prefill = fake.on_decode = never
        task = aio.spawn(house.conductor.serve(house.job()), "serve")
        await aio.sleep_ns(5 * MS)
        assert fake.inside == 1
        house.conductor.leave(victim)
        died_ns = aio.now_ns()
        job_ended = aio.spawn(task_end(task), "watch")
        await aio.sleep_ns(1)
        assert fake.inside == 0, "the procedure on the dead instance is over"
        assert house.log.retries == [died_ns]
        await job_ended
        house.check_empty()

    async def task_end(task: asyncio.Task[None]) -> None:
        await task

    virtual(main)


def test_a_decode_instance_that_dies_during_prefill_fails_the_job_only_once() -> None:
    async def main() -> None:
        house = House().open("d0", "d1", "p0")

        async def slow(job: Job) -> None:
            await aio.sleep_ns(10 * MS)

        house.instances["p0"].on_prefill = slow
        job = house.job()
        task = aio.spawn(house.conductor.serve(job), "serve")
        await aio.sleep_ns(5 * MS)
        house.conductor.leave("d0")
        await task
        assert job.row.attempts == 2
        assert house.instances["d0"].calls == 0
        assert house.instances["d1"].calls == 1
        assert house.state._unreported[house.state.members["d1"].index][-1][0] == 1
        house.check_empty()

    virtual(main)


@pytest.mark.parametrize("cluster", [("d0", "p0"), ("m0",)])
@pytest.mark.parametrize("after_ns", [0, 1, MS - 1, MS, MS + 1, 2 * MS - 1])
def test_a_cancelled_job_settles_wherever_it_is(cluster: tuple[str, ...], after_ns: int) -> None:
    async def main() -> None:
        house = House().open(*cluster)
        task = aio.spawn(house.conductor.serve(house.job()), "serve")
        await aio.sleep_ns(after_ns)
        await aio.settle(task)
        house.check_empty()
        assert [kind for kind, _ in house.log.journal if kind in ("assign", "settle")] in (["assign", "settle"], [])

    virtual(main)


def test_a_record_that_arrives_in_the_instant_of_the_cancel_is_released() -> None:
    """A client that goes away when it sees the first token: the finished prompt must not stay pinned for ever."""

    async def main() -> None:
        house = House().open("d0", "p0")
        job = house.job()

        def go_away(tokens: object, ends_ns: object) -> None:
            task.cancel()

        job.first.listener = go_away
        task = aio.spawn(house.conductor.serve(job), "serve")
        await aio.sleep_ns(5 * MS)
        assert task.cancelled()
        house.check_empty()

    virtual(main)


@pytest.mark.parametrize("turns", range(6))
def test_a_cancel_in_any_turn_of_the_loop_keeps_the_accounts(turns: int) -> None:
    """Within one instant a job goes from frontend to instance; wherever it is caught, later ones are counted right."""

    async def main() -> None:
        house = House().open("d0", "p0")
        accepted = [0]

        async def accept(job: Job) -> None:
            accepted[0] += 1
            await aio.sleep_ns(MS)

        house.instances["p0"].on_prefill = accept
        task = aio.spawn(house.conductor.serve(house.job()), "serve")
        for _ in range(turns):
            await asyncio.sleep(0)
        await aio.settle(task)
        house.check_empty()
        await house.conductor.serve(house.job(2))
        member = house.state.members["p0"]
        assert member.sent == accepted[0], "what is counted as sent has been seen by the instance"
        house.check_empty()

    virtual(main)


# Admission


def test_rejected_at_arrival_is_never_retried_and_nothing_is_queued() -> None:
    async def main() -> None:
        house = House(admission=EarlyRejection()).open("d0", "p0")
        job = house.job(slo=SLO(0.5, float("inf")))  # the prompt alone takes 1 s
        with pytest.raises(Rejected, match="ttft at arrival") as caught:
            await house.conductor.serve(job)
        assert caught.value.retry_after_s == pytest.approx(0.5)
        assert house.instances["p0"].calls == 0
        assert house.log.retries == []
        assert [decision.stage for decision in house.log.decisions] == ["prefill", "decode", "admission.arrival"]
        house.check_empty()

    virtual(main)


def test_the_queue_is_part_of_the_expected_first_token() -> None:
    """Row 38 of the field: a planner that ignores queueing admits what must miss."""

    async def main() -> None:
        house = House(admission=EarlyRejection()).open("d0", "p0")
        house.instances["p0"].on_prefill = never
        tasks = [aio.spawn(house.conductor.serve(house.job(number, SLO(2.5, 1.0))), "serve") for number in (1, 2)]
        await aio.sleep_ns(MS)
        with pytest.raises(Rejected):  # two prompts of 1 s are before it
            await house.conductor.serve(house.job(3, SLO(2.5, 1.0)))
        for task in tasks:
            assert not task.done()
            await aio.settle(task)
        house.check_empty()

    virtual(main)


def test_rejected_at_the_decode_stage_gives_everything_back_and_is_never_retried() -> None:
    async def main() -> None:
        house = House(admission=EarlyRejection()).open("d0", "p0")
        slo = SLO(float("inf"), 2.5e-3)  # the step with this job alone takes about 2 ms

        async def meanwhile(job: Job) -> None:
            await aio.sleep_ns(NS_PER_S // 10)
            # While it computed, others filled the instance.
            house.bus.load(house.instances["d0"].number, (0, 0, 30, 30_000, 0, 0))
            await aio.sleep_ns(NS_PER_S)

        house.instances["p0"].on_prefill = meanwhile
        job = house.job(slo=slo)
        with pytest.raises(Rejected, match="tbt at decode"):
            await house.conductor.serve(job)
        assert house.instances["d0"].calls == 0
        assert house.instances["p0"].calls == 1
        assert [decision.outcome for decision in house.log.decisions if decision.stage == "prefill"] == ["Rejected"]
        house.check_empty()

    virtual(main)


def test_who_was_taken_on_is_not_turned_away_for_losing_its_place() -> None:
    """Between two attempts the cluster fills up; the client may have tokens already, and 429 would be a lie."""

    @dataclass(frozen=True)
    class AskedOnce:
        stages: list[str] = field(default_factory=list[str])

        def admit(self, request: Request, expectation: Any, view: ClusterView, stage: Any, rng: Any) -> Any:
            self.stages.append(str(stage))
            return AdmitAll().admit(request, expectation, view, stage, rng)

    async def main() -> None:
        asked = AskedOnce()
        house = House(admission=asked).open("d0", "p0")
        house.instances["d0"].on_decode = failing(1, lambda: TransferError("lost"))
        await house.conductor.serve(house.job())
        assert asked.stages == ["arrival", "decode", "decode"]
        house.check_empty()

    virtual(main)


def test_each_decision_has_its_outcome_beside_what_it_expected() -> None:
    async def main() -> None:
        house = House().open("d0", "p0")
        await house.conductor.serve(house.job())
        prefill, decode = house.log.decisions
        assert (prefill.expected_s, prefill.outcome_s) == pytest.approx((1.0, 0.001))
        assert (decode.expected_s, decode.outcome_s) == pytest.approx((1e-3 + 1e-6 + 1000e-6, 0.001))
        assert (prefill.outcome, decode.outcome) == ("completed", "completed")

    virtual(main)


# Replay, and mistakes of a user's strategy


def test_the_journal_says_which_attempt_a_placement_is_for() -> None:
    async def main() -> None:
        house = House(admission=EarlyRejection()).open("d0", "p0")
        house.instances["p0"].on_prefill = failing(1, lambda: TransferError("lost"))
        await house.conductor.serve(house.job())
        own = [entry for entry in house.log.journal if entry[0] != "join"]
        assert [
            kind for kind, _ in own
        ] == "place assign settle place assign recheck hand_over settle completed".split()
        assert [values for kind, values in own if kind == "place"] == [[1, 1], [1, 2]]
        assert [values for kind, values in own if kind == "settle"] == [[1], [1]]

    virtual(main)


@pytest.mark.parametrize("choice", [PrefillChoice(7), PrefillChoice(-1), PrefillChoice(0, source=9)])
def test_a_strategy_that_chooses_nobody_is_named(choice: PrefillChoice) -> None:
    class Wild:
        def choose(self, request: Request, view: ClusterView, rng: np.random.Generator) -> PrefillChoice:
            return choice

    async def main() -> None:
        house = House().open("d0", "p0")
        house.conductor._strategies = Strategies(Wild(), LeastLoaded(), Cheapest(), AdmitAll(), Static())
        with pytest.raises(Exception, match=r"sched\.prefill=Wild: chose"):
            await house.conductor.serve(house.job())
        house.check_empty()

    virtual(main)
