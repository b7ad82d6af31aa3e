"""Two tiers of one node under random requests and faults: no wrong byte, nothing lost that must not be, always room."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tiers_fixtures import BLOCK_BYTES, MS, TieredNode, digest, payload

from mcjax import aio
from mcjax.backends.check.faults import Faults
from mcjax.errors import PoolFull
from mcjax.kvpool.base import Tiering
from mcjax.kvpool.tiering.on_evict import OnEvict
from mcjax.kvpool.tiering.write_back import WriteBack
from mcjax.kvpool.tiering.write_through import WriteThrough
from mcjax.types import NS_PER_S, BlockId

LONGEST = 6
TIERINGS: dict[str, Any] = {
    "write_through": WriteThrough,
    "after a hit": partial(WriteThrough, 1),
    "write_back": partial(WriteBack, 0.3),
    "on_evict": OnEvict,
}
TROUBLE = Faults(lost=0.05, late=0.05, duplicated=0.05, corrupted=0.05, slow=0.05, ssd_failed=0.1)


def chain(path: Sequence[int]) -> tuple[BlockId, ...]:
    """Names of a path through a tree: a block is named by all that leads to it."""
    names: list[BlockId] = []
    for step in path:
        names.append((names[-1] if names else 0) * 4 + step + 1)
    return tuple(names)


paths = st.lists(st.integers(0, 1), min_size=1, max_size=LONGEST).map(chain)


class TiersMachine(RuleBasedStateMachine):
    """Requests run as tasks, so that several are under way at once; time passes in a rule of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.node: TieredNode
        self.tasks: list[Any] = []
        self.todo: list[Coroutine[Any, Any, None]] = []
        self.problems: list[str] = []
        self.wake = aio.Signal("requests")

    @initialize(
        tiering=st.sampled_from(sorted(TIERINGS)),
        exclusive=st.booleans(),
        dram_blocks=st.integers(LONGEST, 12),
        ssd_blocks=st.integers(2, 40),
        span_blocks=st.integers(1, 4),
        faulty=st.booleans(),
        seed=st.integers(0, 1000),
    )
    def begin(
        self,
        tiering: str,
        exclusive: bool,
        dram_blocks: int,
        ssd_blocks: int,
        span_blocks: int,
        faulty: bool,
        seed: int,
    ) -> None:
        strategy: Tiering = TIERINGS[tiering](exclusive=exclusive)
        faults = TROUBLE if faulty else Faults()
        self.node = TieredNode(strategy, dram_blocks, ssd_blocks, faults, span_blocks, seed)
        self._watch_leaving()
        self.main = self.node.loop.create_task(self._main(), name="main")
        self.pass_time(1)

    def _watch_leaving(self) -> None:
        """What must be below when it leaves is there, unless that tier failed or had no room for it."""
        node, room = self.node, self.node.dram.room
        leaving = room.leaving

        def watched(count: int, tenant: str) -> list[BlockId]:
            victims = leaving(count, tenant)
            if node.saving.tiering.must_save:
                lost = [block for block in victims if block not in node.ssd and not node.saving.excused(block)]
                if lost:
                    self.problems.append(f"blocks {lost} left unsaved")
            return victims

        room.leaving = watched

    async def _main(self) -> None:
        async with aio.Scope("node") as scope:
            scope.spawn(self.node.saving.run(), "saving")
            while True:
                while self.todo:
                    self.tasks.append(scope.spawn(self.todo.pop(0), "request"))
                await self.wake.wait(aio.now_ns() + NS_PER_S)  # so that time never stands still

    async def _room(self, most: int) -> None:
        with suppress(PoolFull):
            await self.node.make_room(min(most, self.node.memory.capacity))

    async def _there_and_back(self, blocks: tuple[BlockId, ...], rots: int | None) -> None:
        await self._visit(blocks, 0)
        await self._room(LONGEST * 2)
        if rots is not None and blocks[rots % len(blocks)] in self.node.ssd:
            self._flip(self.node.ssd.region((blocks[rots % len(blocks)],)).slots[0], rots)
        await self._visit(blocks, 0)

    def _flip(self, slot: int, pick: int) -> None:
        self.node.disk.buffer()[slot, pick % BLOCK_BYTES] ^= 1 << pick % 8

    def _spawn(self, task: Coroutine[Any, Any, None]) -> None:
        self.todo.append(task)
        self.wake.set()

    async def _visit(self, blocks: tuple[BlockId, ...], hold_ms: int) -> None:
        """A request: fetch, verify, compute what is missing, hold it for a while, verify again."""
        node = self.node
        pin, _ = await node.fetch(blocks)
        try:
            sound = node.verified(pin)
        finally:
            node.dram.release(pin)
        if sound < len(pin):
            return  # it would be placed again
        try:
            pin = await node.write(blocks)
        except PoolFull:
            return
        try:
            await aio.sleep_ns(hold_ms * MS)
            missing = [block for block in pin.blocks if block not in node.dram]
            if missing and not node.counts.counts.get("corrupted"):  # only what is corrupt may go
                self.problems.append(f"blocks {missing} left while they were pinned")
            node.verified(pin)
        finally:
            node.dram.release(pin)

    # What happens

    @rule(blocks=paths, hold_ms=st.integers(0, 30))
    def request(self, blocks: tuple[BlockId, ...], hold_ms: int) -> None:
        self._spawn(self._visit(blocks, hold_ms))

    @rule(blocks=paths, rots=st.none() | st.integers(0, 1000))
    def comes_back(self, blocks: tuple[BlockId, ...], rots: int | None) -> None:
        """A session that goes on after its blocks have left host memory, and one of them may have rotted below."""
        self._spawn(self._there_and_back(blocks, rots))

    @rule(most=st.integers(1, 12))
    def make_room(self, most: int) -> None:
        """Somebody needs so much of the host memory for a moment."""
        self._spawn(self._room(most))

    @rule(ms=st.integers(1, 200))
    def pass_time(self, ms: int) -> None:
        loop = self.node.loop
        if loop.run_until(self.main, loop.now_ns() + ms * MS):
            self.main.result()

    @rule(pick=st.integers(0, 100))
    def client_goes_away(self, pick: int) -> None:
        if self.tasks:
            self.tasks[pick % len(self.tasks)].cancel()

    @rule(pick=st.integers(0, 1000))
    def rot(self, pick: int) -> None:
        slots = self.node.disk.resting()
        if slots:
            self._flip(slots[pick % len(slots)], pick)

    @rule(ms=st.integers(1, 100))
    def outage(self, ms: int) -> None:
        self.node.outages_ns["n"] = self.node.loop.now_ns() + ms * MS

    # What must hold

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "node"):
            self.node.check()
            assert not self.problems
            for task in self.tasks:
                if task.done() and not task.cancelled():
                    task.result()

    @invariant()
    def no_block_is_known_by_another_checksum(self) -> None:
        if hasattr(self, "node"):
            for pool in (self.node.dram, self.node.ssd):
                for block, recorded in pool.contents().items():
                    assert recorded == digest(payload(block))

    def teardown(self) -> None:
        """In the end everybody is served or gone, nothing is held, and all of the host memory can be had."""
        if not hasattr(self, "node"):
            return
        node = self.node
        try:
            self.pass_time(20_000)
            self.adds_up()
            assert all(task.done() for task in self.tasks), node.loop.who_waits()
            ending = node.loop.create_task(self._ending())
            self.pass_time(100_000)
            assert ending.done(), node.loop.who_waits()
            ending.result()
        finally:
            self.main.cancel()
            node.loop.run_until(self.main, node.loop.now_ns() + MS)

    async def _ending(self) -> None:
        await self.node.settled()
        for pool in (self.node.dram, self.node.ssd):
            pool.check_idle()
        await self.node.make_room(self.node.memory.capacity)


TestTiers = TiersMachine.TestCase
TestTiers.settings = settings(max_examples=40, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow])


def test_paths_share_names_as_far_as_they_go_together() -> None:
    assert chain((0, 1, 2))[:2] == chain((0, 1, 0))[:2]
    assert chain((0, 1)) != chain((1, 0))
    assert not np.array_equal(payload(chain((0,))[0]), payload(chain((1,))[0]))
