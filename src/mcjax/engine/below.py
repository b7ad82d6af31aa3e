"""The tier below a node's host memory: the pool of its SSD, so many moves at a time, and whether it works at all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mcjax import aio
from mcjax.engine.node import Node
from mcjax.errors import BlockCorrupt, InstanceDown, StaleRegion, TierUnavailable, TransferError, Unencodable
from mcjax.kvpool.pool import Pool
from mcjax.transfer.base import Copy, CopyResult
from mcjax.types import NS_PER_S, BlockId

SPAN_BLOCKS = 32
SPAN_BYTES = 64 << 20
"""Most of one move: long enough for a disk to run at its pace, short enough that others get their turn."""

MOVES = 8
"""Moves in flight in one direction. What is more waits here, so that a bound on a move is not one on a queue."""

PAUSE_NS = NS_PER_S // 10
LONGEST_PAUSE_NS = 30 * NS_PER_S
"""How long a tier that has failed is left alone: twice as long each time, up to a bound."""


class TierBelow:
    """What saving and promotion share. While it is paused, its blocks count as not there, and nothing must go there."""

    def __init__(self, node: Node, pool: Pool, patience_ns: int):
        self.pool = pool
        self.span_blocks = max(1, min(SPAN_BLOCKS, SPAN_BYTES // max(1, pool.store.block_bytes)))
        """Most blocks of one move."""
        self.resumes_ns = 0
        """The end of the last pause."""
        self._node = node
        self._patience_ns = patience_ns
        self._pause_ns = 0
        self._down = _Lane(f"{node.name}.down")
        self._up = _Lane(f"{node.name}.up")

    @property
    def available(self) -> bool:
        return aio.now_ns() >= self.resumes_ns

    async def move(self, copy: Copy) -> CopyResult:
        """Move a span to or from the tier when its turn comes; the result has the checksums of what was read, and of
        what was written.

        Raises:
            TierUnavailable: it is paused, or the move did not end in time.
            StaleRegion: source or target changed hands.
            BlockCorrupt: a block is not what it should be; the transport does not say which of several.
            Unencodable: the tier's encoding does not take it.
            TransferError: the move failed. Like `TierUnavailable`, that pauses the tier.
        """
        lane = self._down if copy.target.memory is self.pool.store else self._up
        await lane.enter()
        try:
            if not self.available:
                raise TierUnavailable("it has failed lately", copy.request_id, copy.first_block)
            moved = await self._in_time(copy)
            self._pause_ns = 0
            return moved
        except (StaleRegion, BlockCorrupt, Unencodable):
            raise  # the tier is not to blame
        except TransferError:
            self._pause()
            raise
        finally:
            lane.leave()

    async def _in_time(self, copy: Copy) -> CopyResult:
        late: asyncio.Future[None] = aio.new_future()

        def too_late() -> TierUnavailable:
            bound_s = self._patience_ns / NS_PER_S
            return TierUnavailable(f"no answer within {bound_s:g} s", copy.request_id, copy.first_block)

        timer = aio.clock().call_at_ns(aio.now_ns() + self._patience_ns, _end, late)
        try:
            return await aio.unless(late, too_late, self._node.perform(copy))
        finally:
            timer.cancel()

    def _pause(self) -> None:
        if self.available:  # what was in flight together fails together, and counts once
            self._pause_ns = min(max(2 * self._pause_ns, PAUSE_NS), LONGEST_PAUSE_NS)
            self.resumes_ns = aio.now_ns() + self._pause_ns

    def check_up(self) -> None:
        """Raises `InstanceDown` if the node has died."""
        if not self._node.alive:
            raise InstanceDown(self._node.name)


class _Lane:
    """So many at once, in order of arrival."""

    def __init__(self, name: str):
        self._inside = 0
        self._queue = aio.WaitQueue(name)

    async def enter(self) -> None:
        entered: list[None] = []

        def attempt() -> bool:
            if self._inside >= MOVES:
                return False
            self._inside += 1
            entered.append(None)
            return True

        try:
            await self._queue.until(attempt)
        except BaseException:
            if entered:  # let in, and cancelled before it knew
                self.leave()
            raise

    def leave(self) -> None:
        self._inside -= 1
        self._queue.notify()


def _end(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def corrupt(found: Sequence[bytes], recorded: Sequence[bytes]) -> int | None:
    """Index of the first block whose checksum as read is not the one recorded; those of worlds without bytes match."""
    for index, (read, written) in enumerate(zip(found, recorded, strict=False)):
        if written and read != written:
            return index
    return None


def parent_at(blocks: Sequence[BlockId], index: int) -> BlockId | None:
    """What block `index` of a whole chain continues."""
    return blocks[index - 1] if index else None
