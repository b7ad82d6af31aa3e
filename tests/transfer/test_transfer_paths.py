"""The transfer engine over several paths: striping, failing over and coming back, queues, classes, ownership."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wires import Wires, rails, stores

from mcjax import aio
from mcjax.backends.virtual import VirtualLoop
from mcjax.errors import IntegrityError, TransferError, TransferTimeout
from mcjax.transfer.base import Copy, Pacing
from mcjax.transfer.engine import TransferEngine
from mcjax.transfer.paths.base import PathChoice
from mcjax.transfer.paths.health import Patience
from mcjax.transfer.paths.least_queued import LeastQueued
from mcjax.transfer.paths.nearest import Nearest
from mcjax.transfer.paths.path import PathSettings
from mcjax.transfer.paths.striped import Striped
from mcjax.types import NS_PER_S, NullRecorder

SLICES = Pacing(slice_bytes=20, window_bytes=40)
"""Of two blocks, two at a time."""


class Bench:
    def __init__(
        self,
        wires: Wires,
        blocks: int = 100,
        choice: PathChoice | None = None,
        shares: dict[int, float] | None = None,
        attempts: int = 4,
        deadline_s: float = 5.0,
    ):
        self.wires = wires
        self.source, self.target = stores(blocks)
        patience = Patience(failures=2, backoff_ns=NS_PER_S // 10, most_backoff_ns=NS_PER_S)
        path_settings = PathSettings(link=(1000.0, 0.0), shares=shares or {}, patience=patience)
        choice = choice or Striped(stripe_bytes=1)
        self.engine = TransferEngine([wires], NullRecorder(), deadline_s, attempts, choice, path_settings)
        self.engine.register(self.source)
        self.engine.register(self.target)

    def copy(self, blocks: int, priority: int = 0) -> Copy:
        source, target = self.source.reserve(blocks), self.target.reserve(blocks)
        return Copy(self.source.regions(source), self.target.regions(target), 7, 9, True, priority)

    def give_back(self, copy: Copy) -> None:
        self.source.free(copy.source.slots)
        self.target.free(copy.target.slots)

    def carried(self) -> list[int]:
        return [wire.carried_bytes for wire in self.wires.wires.values()]

    def check_idle(self) -> None:
        assert self.engine.in_flight == 0
        for path in self.engine.paths.values():
            assert (path.in_flight_bytes, path.queued, path.queued_bytes) == (0, 0, 0)
        for store in (self.source, self.target):
            store.check_integrity()
            store.check_idle()


def virtual(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    VirtualLoop().run(main)


def exactly_once(bench: Bench, copy: Copy) -> None:
    wanted = zip(copy.source.slots, copy.target.slots, strict=True)
    assert Counter(bench.wires.delivered) == Counter(wanted)


@pytest.mark.parametrize("pacing", [None, SLICES])
def test_a_big_copy_is_spread_over_nics_and_each_carries_its_share(pacing: Pacing | None) -> None:
    async def main() -> None:
        bench = Bench(Wires(rails(4), pacing))
        copy = bench.copy(99)
        result = await bench.engine.perform(copy)
        assert sorted(bench.carried()) == [240, 250, 250, 250]
        assert aio.now_ns() == NS_PER_S // 4, "four times as fast as one"
        assert result.checksums == tuple(str(slot).encode() for slot in copy.source.slots), "in the copy's order"
        exactly_once(bench, copy)
        bench.check_idle()

    virtual(main)


def test_a_nic_that_is_down_is_gone_around_and_used_again_when_it_is_back() -> None:
    """Field failures, row 28."""

    async def main() -> None:
        bench = Bench(Wires(rails(4), SLICES))
        bench.wires.wires["n1"].down = True
        for _ in range(3):
            copy = bench.copy(40)
            await bench.engine.perform(copy)
            exactly_once(bench, copy)
            bench.wires.delivered.clear()
            bench.give_back(copy)
        assert bench.carried()[1] == 0
        tried = [name for _, name, _, _ in bench.wires.submitted].count("n1")
        path = bench.engine.paths[0, "n1", "n1"]
        assert not path.health.is_well()
        await bench.engine.perform(copy := bench.copy(40))
        bench.give_back(copy)
        assert [name for _, name, _, _ in bench.wires.submitted].count("n1") <= tried + 1, "left alone, or one probe"
        bench.wires.wires["n1"].down = False
        await aio.sleep_ns(NS_PER_S)
        before = bench.carried()
        await bench.engine.perform(copy := bench.copy(40))
        bench.give_back(copy)
        await bench.engine.perform(copy := bench.copy(40))
        bench.give_back(copy)
        assert bench.carried()[1] - before[1] >= 100, "one success, and it has its share again"
        bench.check_idle()

    virtual(main)


def test_a_nic_that_hangs_costs_a_deadline_and_its_late_answers_change_nothing() -> None:
    async def main() -> None:
        bench = Bench(Wires(rails(2), SLICES), deadline_s=1.0)
        bench.wires.wires["n0"].hangs = True
        copy = bench.copy(20)
        result = await bench.engine.perform(copy)
        assert len(result.checksums) == 20
        assert NS_PER_S < aio.now_ns() < 1.2 * NS_PER_S
        exactly_once(bench, copy)
        bench.give_back(copy)
        assert bench.engine.in_flight == 2, "what had begun there still owns its slots"
        with pytest.raises(IntegrityError):
            bench.target.check_idle()
        bench.wires.mend("n0")
        await aio.sleep_ns(1)
        bench.check_idle()
        assert len(result.checksums) == 20

    virtual(main)


def test_if_no_path_is_well_the_least_bad_one_is_tried() -> None:
    async def main() -> None:
        bench = Bench(Wires(rails(2)), attempts=8)
        for wire in bench.wires.wires.values():
            wire.down = True
        aio.clock().call_at_ns(NS_PER_S // 4, bench.wires.mend, "n1")
        copy = bench.copy(10)
        await bench.engine.perform(copy)
        exactly_once(bench, copy)
        bench.check_idle()

    virtual(main)


def test_when_every_attempt_failed_everywhere_the_error_says_whose_and_nothing_is_held() -> None:
    async def main() -> None:
        bench = Bench(Wires(rails(3), SLICES), attempts=3)
        for wire in bench.wires.wires.values():
            wire.down = True
        with pytest.raises(TransferError, match="request 7, block 9: the wire is down"):
            await bench.engine.perform(bench.copy(30))
        bench.check_idle()

    virtual(main)


def test_a_higher_class_goes_first_from_the_next_slice_on() -> None:
    async def main() -> None:
        bench = Bench(Wires(rails(1), SLICES))
        low = aio.spawn(bench.engine.perform(bench.copy(40)), "low")
        await aio.sleep_ns(NS_PER_S // 1000)
        began_ns = aio.now_ns()
        await bench.engine.perform(bench.copy(4, priority=1))
        # 40 bytes were under way, then its own 40: the 360 that waited have let it by.
        assert aio.now_ns() - began_ns <= 0.08 * NS_PER_S
        await low
        assert aio.now_ns() == round(0.44 * NS_PER_S), "and the wire was never idle"
        assert bench.wires.most_under_way["n0"] == 40
        bench.check_idle()

    virtual(main)


def test_a_class_gets_its_share_under_a_flood() -> None:
    async def main() -> None:
        bench = Bench(Wires(rails(1), SLICES), blocks=500, shares={0: 0.25})
        flood = aio.spawn(bench.engine.perform(bench.copy(400, priority=5)), "flood")
        batch = bench.copy(50)
        await bench.engine.perform(batch)
        assert aio.now_ns() <= 2.1 * NS_PER_S, "500 bytes at a quarter of 1000 a second"
        assert not flood.done()
        await flood
        bench.check_idle()

    virtual(main)


def test_a_cancelled_copy_frees_at_once_what_has_not_begun() -> None:
    async def main() -> None:
        bench = Bench(Wires(rails(1), SLICES))
        copy = bench.copy(50)
        task = aio.spawn(bench.engine.perform(copy), "copy")
        await aio.sleep_ns(NS_PER_S // 1000)
        await aio.settle(task)
        bench.give_back(copy)
        assert bench.target.free_slots == 96, "all but the four blocks that are under way"
        await aio.sleep_ns(NS_PER_S)
        assert bench.target.free_slots == 100
        assert sum(blocks for _, _, _, blocks in bench.wires.submitted) == 4
        bench.check_idle()

    virtual(main)


def test_a_copy_with_a_deadline_of_its_own_ends_there_whatever_attempts_are_left() -> None:
    async def main() -> None:
        bench = Bench(Wires(rails(1), SLICES))
        copy = bench.copy(50)
        copy.deadline_ns = NS_PER_S // 10
        with pytest.raises(TransferTimeout):
            await bench.engine.perform(copy)
        assert aio.now_ns() == NS_PER_S // 10
        await aio.sleep_ns(NS_PER_S)
        assert sum(blocks for _, _, _, blocks in bench.wires.submitted) < 20
        bench.check_idle()

    virtual(main)


def test_waiting_in_a_queue_is_no_fault_of_the_path() -> None:
    async def main() -> None:
        bench = Bench(Wires(rails(1), SLICES), attempts=1, deadline_s=0.5)
        first = aio.spawn(bench.engine.perform(bench.copy(60, priority=1)), "first")
        await aio.sleep_ns(1)
        with pytest.raises(TransferTimeout):
            await bench.engine.perform(bench.copy(2))
        (path,) = bench.engine.paths.values()
        assert path.failures == 0
        with pytest.raises(TransferTimeout):
            await first
        await aio.sleep_ns(NS_PER_S)
        bench.check_idle()

    virtual(main)


def test_of_several_copies_each_has_a_result_of_its_own() -> None:
    async def main() -> None:
        bench = Bench(Wires(rails(2)))
        good, stale, other = bench.copy(3), bench.copy(3), bench.copy(2)
        bench.source.free(stale.source.slots)
        results = await bench.engine.perform_all([good, stale, other])
        assert [type(result.error).__name__ for result in results] == ["NoneType", "StaleRegion", "NoneType"]
        assert [len(result.checksums) for result in results] == [3, 0, 2]
        bench.check_idle()

    virtual(main)


def test_a_region_that_changes_hands_in_mid_copy_ends_it_and_no_later_slice_is_begun() -> None:
    async def main() -> None:
        bench = Bench(Wires(rails(2), SLICES))
        copy = bench.copy(60)
        aio.clock().call_at_ns(NS_PER_S // 10, bench.target.free, copy.target.slots)
        with pytest.raises(TransferError, match="changed hands"):
            await bench.engine.perform(copy)
        assert aio.now_ns() < 0.2 * NS_PER_S
        await aio.sleep_ns(NS_PER_S)
        assert sum(blocks for _, _, _, blocks in bench.wires.submitted) < 40
        bench.check_idle()

    virtual(main)


@pytest.mark.parametrize("choice", [Nearest(), Striped(stripe_bytes=1), LeastQueued(stripe_bytes=1)])
def test_traffic_stays_inside_the_switch_domain_until_it_cannot(choice: PathChoice) -> None:
    async def main() -> None:
        bench = Bench(Wires(rails(4, crossing=["n0", "n2"])), choice=choice)
        await bench.engine.perform(first := bench.copy(40))
        bench.give_back(first)
        assert (bench.carried()[0], bench.carried()[2]) == (0, 0)
        for name in ("n1", "n3"):
            bench.wires.wires[name].down = True
        await bench.engine.perform(bench.copy(40))
        assert bench.carried()[0] + bench.carried()[2] == 400
        bench.check_idle()

    virtual(main)


def test_an_estimate_learns_and_counts_what_waits() -> None:
    async def main() -> None:
        bench = Bench(Wires(rails(2), SLICES), blocks=2000)
        assert bench.engine.estimate(1000, bench.source, bench.target) == pytest.approx(0.5)
        for wire in bench.wires.wires.values():
            wire.bytes_per_s = 500.0
        for blocks in (10, 40, 20, 80, 60) * 6:
            await bench.engine.perform(copy := bench.copy(blocks))
            bench.give_back(copy)
        assert bench.engine.estimate(1000, bench.source, bench.target) == pytest.approx(1.0, rel=0.1)
        task = aio.spawn(bench.engine.perform(bench.copy(200)), "copy")
        await aio.sleep_ns(1)
        assert bench.engine.estimate(1000, bench.source, bench.target) == pytest.approx(3.0, rel=0.1)
        await task

    virtual(main)


def test_a_strategy_that_loses_blocks_is_told() -> None:
    class Careless:
        def choose(self, blocks: int, block_bytes: int, candidates: object) -> list[int]:
            return [blocks - 1, 0]

    async def main() -> None:
        bench = Bench(Wires(rails(2)), choice=Careless())
        with pytest.raises(Exception, match=r"transfer\.paths.*Careless"):
            await bench.engine.perform(bench.copy(10))
        bench.check_idle()

    virtual(main)


faults = st.lists(
    st.tuples(st.integers(0, 900), st.sampled_from(["n0", "n1", "n2"]), st.sampled_from(["down", "hangs", "mend"])),
    max_size=8,
)


@settings(max_examples=120)
@given(
    faults=faults,
    copies=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2), st.integers(0, 500)), min_size=1, max_size=5),
    pacing=st.sampled_from([None, SLICES, Pacing(10, 1000)]),
    choice=st.sampled_from([Nearest(), Striped(stripe_bytes=1), LeastQueued(stripe_bytes=20)]),
    cancel_ms=st.none() | st.integers(0, 800),
)
def test_every_block_arrives_once_whatever_paths_fail(
    faults: list[tuple[int, str, str]],
    copies: list[tuple[int, int, int]],
    pacing: Pacing | None,
    choice: PathChoice,
    cancel_ms: int | None,
) -> None:
    """Once, as far as anybody is told: a result has each block's checksum in its place. And nothing stays held."""

    async def main() -> None:
        bench = Bench(Wires(rails(3), pacing), blocks=200, choice=choice, attempts=50, deadline_s=3.0)
        clock = aio.clock()

        def harm(name: str, kind: str) -> None:
            if kind == "mend":
                bench.wires.mend(name)
            else:
                setattr(bench.wires.wires[name], kind, True)

        for at_ms, name, kind in faults:
            clock.call_at_ns(at_ms * 1_000_000, harm, name, kind)
        for name in bench.wires.wires:
            clock.call_at_ns(NS_PER_S, bench.wires.mend, name)
        made = [bench.copy(blocks, priority) for blocks, priority, _ in copies]

        async def move(copy: Copy, at_ms: int) -> tuple[bytes, ...]:
            await aio.sleep_ns(at_ms * 1_000_000)
            return (await bench.engine.perform(copy)).checksums

        tasks = [
            aio.spawn(move(copy, at_ms), f"{index}")
            for index, (copy, (_, _, at_ms)) in enumerate(zip(made, copies, strict=True))
        ]
        if cancel_ms is not None:
            clock.call_at_ns(cancel_ms * 1_000_000, tasks[0].cancel)
        await aio.sleep_ns(60 * NS_PER_S)
        for copy, task in zip(made, tasks, strict=True):
            assert task.done(), "nothing hangs"
            if task is tasks[0] and task.cancelled():
                continue
            assert task.result() == tuple(str(slot).encode() for slot in copy.source.slots)
            assert set(zip(copy.source.slots, copy.target.slots, strict=True)) <= set(bench.wires.delivered)
            if not faults:
                assert not [pair for pair, times in Counter(bench.wires.delivered).items() if times > 1]
        for copy in made:
            bench.give_back(copy)
        bench.check_idle()
        assert bench.target.free_slots == 200

    virtual(main)
