"""The transfer engine in virtual time, over a transport that answers when and how the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax import aio
from mcjax.backends.virtual import VirtualLoop
from mcjax.errors import BlockCorrupt, ConfigError, IntegrityError, StaleRegion, TransferError, TransferTimeout
from mcjax.kvpool.stores.slots import SlotStore
from mcjax.transfer.base import Copy, CopyResult, FutureHandle, Memory, TransportStats
from mcjax.transfer.engine import TransferEngine
from mcjax.types import NS_PER_S, NullRecorder, Tier

DEADLINE_S = 1.0


@dataclass
class Told:
    """A transport. Each copy takes the next `(delay_s, error)` of its script; past its end, copies arrive at once."""

    script: list[tuple[float, TransferError | None]] = field(default_factory=list)
    name: str = "told"
    reach: bool = True
    handles: list[FutureHandle] = field(default_factory=list)
    submitted_ns: list[int] = field(default_factory=list)
    memories: list[Memory] = field(default_factory=list)
    priorities: list[int] = field(default_factory=list)

    def register(self, memory: Memory) -> None:
        self.memories.append(memory)

    def deregister(self, memory: Memory) -> None:
        self.memories.remove(memory)

    def reaches(self, source: Memory, target: Memory) -> bool:
        return self.reach

    def stats(self) -> TransportStats:
        return TransportStats()

    def submit(self, copies: list[Copy], priority: int = 0) -> FutureHandle:
        if copies[0].source.memory not in self.memories or copies[0].target.memory not in self.memories:
            raise TransferError("a memory is not registered", copies[0].request_id, copies[0].first_block)
        delay_s, error = self.script[len(self.handles)] if len(self.handles) < len(self.script) else (0.0, None)
        handle = FutureHandle(asyncio.get_running_loop().create_future())
        self.handles.append(handle)
        self.submitted_ns.append(aio.now_ns())
        self.priorities.append(priority)
        result = CopyResult(error, () if error else (b"sum",) * len(copies[0].source.slots))
        aio.clock().call_at_ns(aio.now_ns() + round(delay_s * NS_PER_S), handle.future.set_result, [result])
        return handle


class Log(NullRecorder):
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def event(self, time_ns: int, kind: str, request_id: int, place: str, **values: Any) -> None:
        self.rows.append({"time_ns": time_ns, "kind": kind, "request_id": request_id, "place": place, **values})


class Bench:
    def __init__(self, *transports: Told, attempts: int = 3):
        self.transports = list(transports) or [Told()]
        self.log = Log()
        self.engine = TransferEngine(self.transports, self.log, DEADLINE_S, attempts)
        self.source, self.target = SlotStore("a", Tier.DRAM, 4, 10), SlotStore("b", Tier.DRAM, 4, 10)
        self.engine.register(self.source)
        self.engine.register(self.target)

    def copy(self) -> Copy:
        source, target = self.source.reserve(2), self.target.reserve(2)
        return Copy(self.source.regions(source), self.target.regions(target), request_id=5, first_block=9)

    def give_back(self, copy: Copy) -> None:
        self.source.free(copy.source.slots)
        self.target.free(copy.target.slots)

    def check_idle(self) -> None:
        for store in (self.source, self.target):
            store.check_integrity()
            store.check_idle()


def virtual(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    VirtualLoop().run(main)


def test_a_move_is_one_event_from_submission_to_arrival() -> None:
    async def main() -> None:
        bench = Bench(Told([(0.25, None)]))
        assert await bench.engine.move(bench.copy()) == (b"sum", b"sum")
        (row,) = bench.log.rows
        assert (row["kind"], row["request_id"], row["place"], row["tier"]) == ("transfer", 5, "a>b", "dram>dram")
        assert (row["start_ns"], row["time_ns"]) == (0, NS_PER_S // 4)
        assert (row["first_block"], row["blocks"], row["nbytes"], row["detail"]) == (9, 2, 20, "told")
        bench.check_idle()

    virtual(main)


def test_no_answer_within_the_deadline_is_tried_again_and_the_late_one_ignored() -> None:
    async def main() -> None:
        told = Told([(2.5, None), (0.5, None)])
        bench = Bench(told)
        assert await bench.engine.move(bench.copy()) == (b"sum", b"sum")
        assert told.submitted_ns == [0, NS_PER_S]
        assert aio.now_ns() == round(1.5 * NS_PER_S)
        assert [handle.cancelled for handle in told.handles] == [True, False]
        with pytest.raises(IntegrityError, match="still hold"):
            bench.check_idle()  # the first may still write: its slots are not free for others
        await aio.sleep_until_ns(round(2.5 * NS_PER_S))
        bench.check_idle()
        # A copy that arrives twice is one move; the attempt that was given up has a row of its own.
        rows = [(row["kind"], row["start_ns"], row["time_ns"], row["detail"]) for row in bench.log.rows]
        assert rows == [
            ("transfer_failed", 0, NS_PER_S, "told: TransferTimeout"),
            ("transfer", NS_PER_S, round(1.5 * NS_PER_S), "told"),
        ]
        assert [(row["request_id"], row["first_block"], row["blocks"]) for row in bench.log.rows] == [(5, 9, 2)] * 2

    virtual(main)


@pytest.mark.parametrize("attempts", [1, 2, 3])
def test_after_the_last_attempt_the_error_is_typed_and_names_request_and_block(attempts: int) -> None:
    async def main() -> None:
        told = Told([(9.0, None)] * 3)
        bench = Bench(told, attempts=attempts)
        with pytest.raises(TransferError, match=r"request 5, block 9: no answer within the deadline") as caught:
            await bench.engine.move(bench.copy())
        assert (caught.value.request_id, caught.value.first_block) == (5, 9)
        assert len(told.handles) == attempts
        assert aio.now_ns() == attempts * NS_PER_S, "whoever waits is told within a bound"
        assert [row["kind"] for row in bench.log.rows] == ["transfer_failed"] * attempts
        await aio.sleep_ns(20 * NS_PER_S)
        bench.check_idle()

    virtual(main)


def test_an_error_of_the_mechanism_is_tried_again() -> None:
    async def main() -> None:
        told = Told([(0.1, TransferError("link down")), (0.1, BlockCorrupt("on the way"))])
        bench = Bench(told)
        await bench.engine.move(bench.copy())
        assert len(told.handles) == 3
        bench.check_idle()

    virtual(main)


def test_stale_is_never_tried_again() -> None:
    async def main() -> None:
        told = Told([(0.1, StaleRegion("changed hands", 5, 9))])
        bench = Bench(told)
        with pytest.raises(StaleRegion):
            await bench.engine.move(bench.copy())
        assert len(told.handles) == 1
        bench.check_idle()

    virtual(main)


@pytest.mark.parametrize("end", ["source", "target"])
def test_a_region_that_changed_hands_is_never_submitted(end: str) -> None:
    async def main() -> None:
        told = Told()
        bench = Bench(told)
        copy = bench.copy()
        store, region = (bench.source, copy.source) if end == "source" else (bench.target, copy.target)
        store.free(region.slots)
        store.reserve(2)  # somebody else has them now
        with pytest.raises(StaleRegion):
            await bench.engine.move(copy)
        assert told.handles == []
        bench.check_idle()

    virtual(main)


def test_a_region_that_changes_hands_between_two_attempts_is_not_submitted_again() -> None:
    async def main() -> None:
        told = Told([(0.5, TransferError("link down"))])
        bench = Bench(told)
        copy = bench.copy()
        aio.clock().call_at_ns(NS_PER_S // 4, bench.target.free, copy.target.slots)
        with pytest.raises(StaleRegion):
            await bench.engine.move(copy)
        assert len(told.handles) == 1
        bench.check_idle()

    virtual(main)


def test_the_first_transport_that_reaches_is_used_and_none_is_a_typed_error() -> None:
    async def main() -> None:
        far, near, last = Told(name="far", reach=False), Told(name="near"), Told(name="last")
        bench = Bench(far, near, last)
        await bench.engine.move(bench.copy())
        assert [len(transport.handles) for transport in (far, near, last)] == [0, 1, 0]
        bench = Bench(far)
        with pytest.raises(TransferError, match=r"no transport reaches from a\.dram to b\.dram"):
            await bench.engine.move(bench.copy())
        bench.check_idle()

    virtual(main)


def test_a_copys_priority_reaches_the_transport_with_every_attempt() -> None:
    async def main() -> None:
        told = Told([(0.1, TransferError("link down"))])
        bench = Bench(told)
        copy = bench.copy()
        copy.priority = 3
        await bench.engine.move(copy)
        bench.give_back(copy)
        await bench.engine.move(bench.copy())
        assert told.priorities == [3, 3, 0]

    virtual(main)


def test_moves_side_by_side_each_have_their_own_deadline() -> None:
    """One timer serves them all; neither a move that ended in time nor one that began later moves another's end."""

    async def main() -> None:
        told = Told([(0.2, None), (9.0, None), (1.2, None), (0.95, None)])
        bench = Bench(told, attempts=1)
        region, target = bench.source.regions(bench.source.reserve(1)), bench.target.regions(bench.target.reserve(1))
        ends: list[tuple[int, str]] = []

        async def move(index: int) -> None:
            await aio.sleep_ns(index * NS_PER_S // 10)
            try:
                await bench.engine.move(Copy(region, target))
                ends.append((aio.now_ns(), f"{index} arrived"))
            except TransferError:
                ends.append((aio.now_ns(), f"{index} overdue"))

        tasks = [aio.spawn(move(index), f"move {index}") for index in range(4)]
        for task in tasks:
            await task
        tenths = NS_PER_S // 10
        assert ends == [
            (2 * tenths, "0 arrived"),
            (11 * tenths, "1 overdue"),
            (12 * tenths, "2 overdue"),
            (12.5 * tenths, "3 arrived"),
        ]

    virtual(main)


def test_an_unknown_memory_is_refused_and_nothing_stays_held() -> None:
    async def main() -> None:
        bench = Bench()
        copy = bench.copy()
        bench.engine.deregister(bench.target)
        with pytest.raises(TransferError, match="not registered"):
            await bench.engine.move(copy)
        bench.check_idle()

    virtual(main)


def test_a_cancelled_move_holds_its_slots_until_the_mechanism_answers() -> None:
    """Freed and handed out at once, they would be written by the late copy (the sglang kind of silent corruption)."""

    async def main() -> None:
        told = Told([(0.8, None)])
        bench = Bench(told)
        copy = bench.copy()
        task = aio.spawn(bench.engine.move(copy), "move")
        await aio.sleep_ns(NS_PER_S // 10)
        await aio.settle(task)
        assert told.handles[0].cancelled
        bench.give_back(copy)
        taken = bench.target.reserve(bench.target.free_slots)
        assert not [slot for slot in taken if slot in copy.target.slots]
        bench.target.free(taken)
        await aio.sleep_until_ns(round(0.8 * NS_PER_S))
        bench.check_idle()
        assert bench.target.free_slots == 4

    virtual(main)


def test_an_answer_that_comes_twice_counts_once() -> None:
    """The second one must neither let go of slots that others hold by now, nor change a result."""

    class Stutterer(FutureHandle):
        def when_answered(self, callback: Callable[[list[CopyResult]], object]) -> None:
            super().when_answered(callback)
            late = [CopyResult(TransferError("the same, again"))]
            aio.clock().call_at_ns(NS_PER_S // 2, callback, late)

    class Twice(Told):
        def submit(self, copies: list[Copy], priority: int = 0) -> FutureHandle:
            return Stutterer(super().submit(copies, priority).future)

    async def main() -> None:
        bench = Bench(Twice([(0.1, None)]))
        copy = bench.copy()
        assert await bench.engine.move(copy) == (b"sum", b"sum")
        bench.target.hold(copy.target)  # somebody else's transfer, of the same region
        await aio.sleep_until_ns(NS_PER_S)
        with pytest.raises(IntegrityError, match="still hold"):
            bench.target.check_idle()
        bench.target.let_go(copy.target)
        assert [row["kind"] for row in bench.log.rows] == ["transfer"]
        assert bench.engine.in_flight == 0
        bench.check_idle()

    virtual(main)


@pytest.mark.parametrize(("deadline_s", "attempts", "key"), [(0.0, 3, "deadline_s"), (1.0, 0, "attempts")])
def test_bounds_that_bound_nothing_are_refused(deadline_s: float, attempts: int, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"transfer\.{key}"):
        TransferEngine([], NullRecorder(), deadline_s, attempts)


answers = st.tuples(st.sampled_from([0.0, 0.4, 1.0, 1.7, 3.0]), st.sampled_from([None, "lost", "stale"]))


@settings(max_examples=80)
@given(script=st.lists(answers, max_size=4), cancel_s=st.none() | st.sampled_from([0.0, 0.3, 1.0, 1.2, 2.5]))
def test_whatever_the_mechanism_does_every_move_ends_and_every_slot_comes_back(
    script: list[tuple[float, str | None]], cancel_s: float | None
) -> None:
    outcome: type[TransferError] | None = None
    for delay_s, kind in [*script, (0.0, None), (0.0, None), (0.0, None)][:3]:
        if delay_s <= DEADLINE_S and kind != "lost":
            outcome = StaleRegion if kind == "stale" else None
            break
        outcome = TransferTimeout if delay_s > DEADLINE_S else TransferError
    errors = {None: None, "lost": TransferError("lost", 5, 9), "stale": StaleRegion("changed hands", 5, 9)}

    async def main() -> None:
        told = Told([(delay_s, errors[kind]) for delay_s, kind in script])
        bench = Bench(told)
        copy = bench.copy()
        task = aio.spawn(bench.engine.move(copy), "move")
        if cancel_s is not None:
            aio.clock().call_at_ns(round(cancel_s * NS_PER_S), task.cancel)
        await aio.sleep_until_ns(round((3 * DEADLINE_S + 0.03) * NS_PER_S) + 1)
        assert task.done(), "three attempts of one second each, and pauses of 10 and 20 ms"
        if not task.cancelled():
            problem = task.exception()
            assert (None if problem is None else type(problem)) == outcome
        bench.give_back(copy)
        await aio.sleep_ns(4 * NS_PER_S)
        bench.check_idle()
        assert bench.source.free_slots == bench.target.free_slots == 4

    virtual(main)
