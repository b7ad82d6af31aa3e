"""Bringing blocks from a node's host memory down to its SSD: when the tiering strategy says so, or before they leave.

A block is below only while the block before it is, so what goes down is a path: the missing end of a chain, its first
blocks first. Nothing above is pinned for it: what leaves in mid-save makes its region stale, and the save ends there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import filterfalse

from mcjax import aio
from mcjax.engine.below import TierBelow, corrupt
from mcjax.engine.node import Node
from mcjax.engine.save_paths import NOBODY, Path, SavePaths
from mcjax.errors import BlockCorrupt, InstanceDown, PoolFull, StaleRegion, TransferError, Unencodable
from mcjax.kvpool.base import Tiering
from mcjax.kvpool.holds import Pin, Reservation
from mcjax.transfer.base import Copy, CopyResult
from mcjax.types import NS_PER_S, BlockId, Recorder

PATHS = 4
"""Paths under way at a time .."""
WINDOW = 4
""".. and spans under way of one path."""

GIVEN_UP_NS = NS_PER_S // 2
"""For how long a block that found no room below, or that the tier's encoding does not take, may leave unsaved."""


@dataclass(slots=True, eq=False)
class _Move:
    """A span of a path on its way down."""

    span: Sequence[BlockId]
    checksums: Sequence[bytes]
    """Of what is above."""
    lossy: bool
    reservation: Reservation
    start_ns: int
    task: asyncio.Task[CopyResult] = field(init=False)


class Saving:
    """The `Saver` of a node's host memory, and the procedure that does what it promises."""

    def __init__(self, node: Node, below: TierBelow, tiering: Tiering, recorder: Recorder):
        self.node = node
        self.tiering = tiering
        self._above = node.pool
        self.tier = below
        self._below = below.pool
        self._recorder = recorder
        self._paths = SavePaths(self._above, self._below)
        self._new: dict[BlockId, None] = {}
        """Blocks above that were not below since they came. One that was, and had to leave there, is not brought down
        again: a tier that holds less than what is to leave at once would never have it all."""
        self._too_many = False
        """Whether some shall go down ahead of need."""
        self._hits: dict[BlockId, int] = {}
        self._given_up: dict[BlockId, int] = {}
        """Until when a block that cannot be saved is let go."""
        self._alone: dict[BlockId, None] = {}
        """Blocks of which one is corrupt: each is saved by itself, to find out which."""
        self._moves = 0
        """Under way."""
        self._busy_since_ns = 0
        self._wake = aio.Signal(f"{node.name}.saving")

    # What the tier above asks and tells

    def unsaved(self, blocks: Sequence[BlockId]) -> Sequence[BlockId]:
        if not self.tier.available:
            return ()
        missing = list(filter(self._new.__contains__, blocks))
        if not self.tiering.must_save:
            missing = list(filter(self._paths.__contains__, missing))
        if missing and self._given_up:
            now_ns = aio.now_ns()
            return [block for block in missing if self._given_up.get(block, 0) <= now_ns]
        return missing

    def excused(self, block: BlockId) -> bool:
        """Whether a block may leave though it is not below: it was, or the tier fails, or has no room for it."""
        return block not in self._new or not self.tier.available or self._given_up.get(block, 0) > aio.now_ns()

    def save(self, blocks: Sequence[BlockId]) -> None:
        self._paths.ask(blocks)
        self._wake.set()

    def on_insert(self, blocks: Sequence[BlockId], parent: BlockId | None) -> None:
        new = list(filterfalse(self._below.__contains__, blocks))
        if not new:
            return
        self._new.update(dict.fromkeys(new))
        if self.tiering.at_insert():
            self._want(new)
        elif self._ahead():
            self._too_many = True
            self._wake.set()

    def on_hit(self, blocks: Sequence[BlockId]) -> None:
        wanted: list[BlockId] = []
        for block in filter(self._new.__contains__, blocks):
            hits = self._hits[block] = self._hits.get(block, 0) + 1
            if self.tiering.at_hit(hits):
                wanted.append(block)
        if wanted:
            self._want(wanted)

    def on_remove(self, blocks: Sequence[BlockId]) -> None:
        if self.tiering.must_save and self.node.alive:
            self._count_unsaved(blocks)
        for block in blocks:
            self._new.pop(block, None)
            self._hits.pop(block, None)
            self._given_up.pop(block, None)
            self._alone.pop(block, None)
        if not self.node.alive:
            self._wake.set()

    def _count_unsaved(self, blocks: Sequence[BlockId]) -> None:
        """Of blocks that leave: how many should have been below, and why they are not. (What is corrupt should not.)"""
        missing = list(filter(self._new.__contains__, blocks))
        if missing and not self.tier.available:
            self._note("unsaved", -1, len(missing), "unavailable")
        elif missing and self._given_up:
            full = [block for block in missing if self.excused(block)]
            if full:
                self._note("unsaved", -1, len(full), "no room")

    def on_shed(self, blocks: Sequence[BlockId]) -> None:
        """These have left the tier below, since they came up from there."""
        self._new.update((block, None) for block in blocks if block in self._above)

    def _want(self, blocks: Sequence[BlockId]) -> None:
        self._paths.want(blocks)
        self._wake.set()

    def _ahead(self) -> int:
        """How many blocks to bring down ahead of need."""
        capacity = self._above.store.capacity
        ahead = self.tiering.ahead(len(self._new), capacity)
        # The order of eviction begins with what is saved already: it is not walked through for every few blocks.
        return ahead if ahead >= max(1, capacity // 32) else 0

    def _next_to_leave(self, count: int) -> list[BlockId]:
        found: list[BlockId] = []
        for block in self._above.room.eviction.victims():
            if len(found) == count:
                break
            if block in self._new and block not in self._paths:
                found.append(block)
        return found

    # The procedure

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way down, or about to be: what waits for a paused tier is not."""
        queued = self._too_many or self._paths.waiting
        return not (self.node.alive and (self._paths.open or (self.tier.available and queued)))

    async def run(self) -> None:
        """Bring down what is to go, as long as the node lives."""
        async with aio.Scope(f"{self.node.name}.saving") as scope:
            await scope.run(self._dispatch(scope))

    async def _dispatch(self, scope: aio.Scope) -> None:
        paths = self._paths
        while self.node.alive:
            due_ns = paths.come_due(aio.now_ns())
            if self._too_many:
                self._too_many = False
                paths.want(self._next_to_leave(self._ahead()))
            if paths.waiting and not self.tier.available:
                await self._wake.wait(self.tier.resumes_ns)
                continue
            while paths.open < PATHS and (path := paths.next()) is not None:
                scope.spawn(self._bring_down(path), f"{self.node.name}.save")
            self._above.room.reading.saving = len(paths.busy)
            await self._wake.wait(due_ns)

    async def _bring_down(self, path: Path) -> None:
        """Save a path span by span. Several are on their way at once; they become visible in order."""
        moves: deque[_Move] = deque()
        parent, problem = path.stands_on, None
        last_started = path.stands_on
        try:
            while True:
                while problem is None and path.waiting and len(moves) < WINDOW and not self._must_yield(path):
                    try:
                        moves.append(self._start(path, last_started))
                        last_started = moves[-1].span[-1]
                    except PoolFull as found:
                        if moves:
                            break  # there may be room when they have ended
                        problem = found
                    except (StaleRegion, InstanceDown) as found:
                        problem = found
                if not moves:
                    break
                await self._end(moves[0], parent)
                parent = moves[0].span[-1]
                before, path.standing = path.standing, self._below.stand_on(NOBODY, parent)
                self._let_go(before)
                self._ended(moves.popleft())
            if problem is not None:
                raise problem
            self._paths.want(path.waiting)  # it has yielded
        except (PoolFull, TransferError, InstanceDown) as found:
            self._failed(path, [block for move in moves for block in move.span], found)
        finally:
            for move in moves:
                await aio.settle(move.task)
                self._ended(move)
            self._let_go(path.standing)
            self._paths.end(path)
            self._wake.set()

    def _must_yield(self, path: Path) -> bool:
        """What somebody waits for goes before what is saved ahead of need."""
        return not path.is_urgent and self._paths.open == PATHS and self._paths.urgent

    def _start(self, path: Path, parent: BlockId | None) -> _Move:
        count = 1 if path.waiting[0] in self._alone else min(self.tier.span_blocks, len(path.waiting))
        span = [path.waiting[index] for index in range(count)]
        source, checksums = self._above.region(span), self._above.checksums(span)
        tenant, lossy = self._above.room.tenant_of(span[0]), self._above.is_lossy(span)
        move = _Move(span, checksums, lossy, self._below.reserve(NOBODY, count, tenant=tenant), aio.now_ns())
        store = self._below.store
        store.stage(move.reservation.slots, span, checksums, parent)
        target = store.regions(move.reservation.slots)
        copy = Copy(source, target, NOBODY, span[0], checksum=True)
        if not self._moves:
            self._busy_since_ns = move.start_ns
        self._moves += 1
        move.task = aio.spawn(self.tier.move(copy), f"{self.node.name}.save.{span[0]}")
        for _ in span:
            path.waiting.popleft()
        return move

    async def _end(self, move: _Move, parent: BlockId | None) -> None:
        """Raises `BlockCorrupt` if what was read is not what the tier above says it has."""
        span = move.span
        try:
            moved = await move.task
        except BlockCorrupt:  # the transport looked before it wrote
            if len(span) == 1:
                self._above.drop(span)
            else:
                self._alone.update(dict.fromkeys(span))
            raise
        wrong = corrupt(moved.checksums, move.checksums)
        sound = len(span) if wrong is None else wrong
        written = (moved.converted or move.checksums)[:sound]
        if sound and self._below.commit(move.reservation, span[:sound], parent, written, move.lossy) is None:
            raise StaleRegion("what it continues has left the tier below", NOBODY, span[0])
        for block in span[:sound]:
            self._new.pop(block, None)
            self._hits.pop(block, None)
            self._alone.pop(block, None)
        reading = self._above.room.reading
        reading.saved += sound
        reading.save_ns = (aio.now_ns() - move.start_ns) // len(span)
        if wrong is not None:
            self._above.drop(span[wrong : wrong + 1])
            raise BlockCorrupt("checksum differs as it is saved", NOBODY, span[wrong])

    def _ended(self, move: _Move) -> None:
        self._moves -= 1
        now_ns = aio.now_ns()
        self._above.room.reading.busy_ns += now_ns - self._busy_since_ns
        self._busy_since_ns = now_ns
        self._below.release(move.reservation)
        for block in move.span:
            self._paths.busy.pop(block, None)
        self._above.room.reading.saving = len(self._paths.busy)
        self._above.wake()

    def _let_go(self, pin: Pin | None) -> None:
        if pin is not None:
            self._below.release(pin)

    def _failed(self, path: Path, moving: Sequence[BlockId], problem: Exception) -> None:
        """What is left of a path does not go down now. Unless that is only for want of a little time, it may leave
        unsaved: whoever needs its room does not wait."""
        paths = self._paths
        paths.close(path)
        left = [block for block in (*moving, *path.waiting) if block not in self._below]
        if isinstance(problem, PoolFull):
            if paths.open > 1:
                paths.starve(path, left)
                return
            again_ns = aio.now_ns() + GIVEN_UP_NS
            self._given_up.update(dict.fromkeys(left, again_ns))
            if not path.is_urgent:
                paths.want_at(again_ns, left)
        elif isinstance(problem, Unencodable):
            self._given_up.update(dict.fromkeys(left, aio.now_ns() + GIVEN_UP_NS))
        elif isinstance(problem, TransferError) and not path.is_urgent:
            paths.want(left)  # which waits until the tier is said to work again
        self._above.wake()
        if left and self.node.alive:
            self._note("save_failed", left[0], len(left), f"{type(problem).__name__}: {problem}")

    def _note(self, kind: str, first_block: BlockId, blocks: int, detail: str) -> None:
        store = self._below.store
        self._recorder.event(
            aio.now_ns(),
            kind,
            NOBODY,
            self.node.name,
            tier=store.tier,
            first_block=first_block,
            blocks=blocks,
            nbytes=blocks * store.block_bytes,
            detail=detail,
        )
