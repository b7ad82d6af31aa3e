"""Bringing blocks from a node's SSD up into its host memory, for a request that was found to continue there."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mcjax import aio
from mcjax.engine.below import TierBelow, corrupt, parent_at
from mcjax.engine.node import Node
from mcjax.errors import BlockCorrupt, PoolFull, StaleRegion, TransferError
from mcjax.kvpool.holds import Pin, Reservation
from mcjax.transfer.base import Copy, CopyResult
from mcjax.types import BlockId, Recorder

WINDOW = 4
"""Spans under way of one promotion."""

NO_ROOM, UNAVAILABLE, CORRUPT = "no room", "unavailable", "corrupt"
"""Why a promotion stopped."""


@dataclass(slots=True, eq=False)
class _Move:
    """A span on its way up."""

    span: Sequence[BlockId]
    checksums: Sequence[bytes]
    """Of what is below."""
    lossy: bool
    reservation: Reservation
    task: asyncio.Task[CopyResult] = field(init=False)


class Promotion:
    """One a node. Requests that want the same blocks up share one way: the first goes, the others wait for it."""

    def __init__(
        self,
        node: Node,
        below: TierBelow,
        exclusive: bool,
        recorder: Recorder,
        on_shed: Callable[[Sequence[BlockId]], None],
    ):
        """`on_shed` hears of blocks that have come up and are not below any more."""
        self._node = node
        self._above = node.pool
        self._tier = below
        self._below = below.pool
        self._exclusive = exclusive
        self._recorder = recorder
        self._on_shed = on_shed
        self._under_way: dict[BlockId, asyncio.Future[None]] = {}

    def reach(self, blocks: Sequence[BlockId], accepts_lossy: bool = True) -> int:
        """How many leading blocks are on the SSD, in numbers that will do; none while it does not work."""
        return self._below.match(blocks, accepts_lossy) if self._tier.available else 0

    async def promote(self, owner: int, pin: Pin, blocks: Sequence[BlockId], tenant: str = "") -> str:
        """Bring up what the SSD has of the chain `blocks` beyond `pin`, as far as it goes, and deepen the pin.

        Returns why it stopped short of what the SSD had (`NO_ROOM`, `UNAVAILABLE`, `CORRUPT`); empty if it did not.

        Raises:
            LeaseLost: the pin was a lease, and is lost.
            InstanceDown: the node has died.
        """
        while len(pin) < len(blocks):
            ahead = self._under_way.get(blocks[len(pin)])
            if ahead is None:
                return await self._go(owner, pin, blocks, tenant)
            await aio.first_of([ahead])
            self._above.deepen(pin, blocks)
        return ""

    async def _go(self, owner: int, pin: Pin, blocks: Sequence[BlockId], tenant: str) -> str:
        first = len(pin)
        held = self._below.pin(owner, blocks, accepts_lossy=pin.accepts_lossy)
        there: asyncio.Future[None] = aio.new_future()
        mine = [block for block in blocks[first : len(held)] if block not in self._under_way]
        self._under_way.update(dict.fromkeys(mine, there))
        try:
            await self._bring_up(owner, pin, blocks, len(held), tenant)
        except (PoolFull, TransferError) as problem:
            return self._stopped(owner, blocks[len(pin) : len(held)], problem)
        finally:
            for block in mine:
                del self._under_way[block]
            there.set_result(None)
            self._below.release(held)
            if self._exclusive:
                self._on_shed(self._below.shed(blocks[first : len(pin)], owner))
        return ""

    async def _bring_up(self, owner: int, pin: Pin, blocks: Sequence[BlockId], end: int, tenant: str) -> None:
        """Span by span; several are on their way at once, and become visible in order."""
        moves: deque[_Move] = deque()
        started = len(pin)
        problem: PoolFull | StaleRegion | None = None
        try:
            while True:
                while problem is None and started < end and len(moves) < WINDOW:
                    span = blocks[started : min(end, started + self._tier.span_blocks)]
                    try:
                        moves.append(await self._start(owner, span, tenant))
                    except (PoolFull, StaleRegion) as found:
                        problem = found
                    started += len(span)
                if not moves:
                    break
                self._end(moves[0], await self._read(moves[0], owner), pin, blocks)
                self._above.release(moves.popleft().reservation)
            if problem is not None:
                raise problem
        finally:
            for move in moves:
                await aio.settle(move.task)
                self._above.release(move.reservation)

    async def _start(self, owner: int, span: Sequence[BlockId], tenant: str) -> _Move:
        reservation = await self._node.reserve_saved(owner, len(span), tenant)
        try:
            source, checksums = self._below.region(span), self._below.checksums(span)
        except BaseException:
            self._above.release(reservation)
            raise
        move = _Move(span, checksums, self._below.is_lossy(span), reservation)
        copy = Copy(source, self._above.store.regions(reservation.slots), owner, span[0], checksum=True)
        move.task = aio.spawn(self._tier.move(copy), f"{self._node.name}.promote.{span[0]}")
        return move

    async def _read(self, move: _Move, owner: int) -> CopyResult:
        try:
            return await move.task
        except BlockCorrupt:  # something is missing altogether, and nobody says which
            self._below.drop(move.span, owner)
            raise

    def _end(self, move: _Move, moved: CopyResult, pin: Pin, blocks: Sequence[BlockId]) -> None:
        """Raises `BlockCorrupt` if the SSD gave something else than was written; nobody finds that block any more."""
        span, first = move.span, len(pin)
        wrong = corrupt(moved.checksums, move.checksums)
        sound = len(span) if wrong is None else wrong
        parent = parent_at(blocks, first)
        written = (moved.converted or move.checksums)[:sound]
        if sound and self._above.commit(move.reservation, span[:sound], parent, written, move.lossy) is None:
            raise StaleRegion("what it continues has left the tier above", pin.owner, span[0])
        self._above.deepen(pin, blocks[: first + sound])
        if wrong is not None:
            self._below.drop(span[wrong : wrong + 1], pin.owner)
            raise BlockCorrupt("checksum differs as it comes from the SSD", pin.owner, span[wrong])

    def _stopped(self, owner: int, left: Sequence[BlockId], problem: PoolFull | TransferError) -> str:
        reason = NO_ROOM if isinstance(problem, PoolFull) else UNAVAILABLE
        if isinstance(problem, BlockCorrupt | StaleRegion):
            reason = CORRUPT  # or dropped as such meanwhile, on behalf of somebody else
        self._recorder.event(
            aio.now_ns(),
            "promote_failed",
            owner,
            self._node.name,
            tier=self._below.store.tier,
            first_block=left[0] if left else -1,
            blocks=len(left),
            nbytes=len(left) * self._below.store.block_bytes,
            detail=f"{reason}: {problem}",
        )
        return reason
