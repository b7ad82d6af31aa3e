"""One attempt at a copy on one path: its slices wait in the path's queue, and own their slots from when they begin."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mcjax.errors import StaleRegion
from mcjax.transfer.base import Copy, CopyResult, Handle

if TYPE_CHECKING:
    from mcjax.transfer.paths.path import Path


class Attempt:
    """A copy's way over one path, slice by slice. The caller awaits `waiter` and nothing of the mechanism's, so that
    cancelling the caller leaves that as it is; late answers find nobody who listens.
    """

    __slots__ = ("arrived", "begun", "copy", "error", "given_up", "path", "priority", "under_way", "waiter")

    def __init__(self, path: Path, copy: Copy):
        self.path = path
        self.copy = copy
        self.priority = copy.priority
        self.error: Exception | None = None
        """Why it came to nothing, or to less than all."""
        self.given_up = False
        self.begun = 0
        """Blocks that have been given to the mechanism: the first ones."""
        self.arrived: list[tuple[int, int, CopyResult]] = []
        """Slices that are there: first block in the copy, how many, what came of them."""
        self.under_way: dict[Slice, None] = {}
        """Slices that the mechanism has not answered."""
        self.waiter: asyncio.Future[None] | None = None

    @property
    def wants_more(self) -> bool:
        """Whether a slice is still to be begun."""
        return self.begun < len(self.copy.source.slots) and self.error is None and not self.given_up

    @property
    def is_over(self) -> bool:
        return not self.under_way and not self.wants_more

    def next_blocks(self) -> int:
        """Of the next slice: as many as fit the path's slices, at least one."""
        left, pacing = len(self.copy.source.slots) - self.begun, self.path.pacing
        return left if pacing is None else min(left, max(1, pacing.slice_bytes // self.copy.source.memory.block_bytes))

    def next_bytes(self) -> int:
        return self.next_blocks() * self.copy.source.memory.block_bytes

    def left_bytes(self) -> int:
        """Of what has not begun."""
        return (len(self.copy.source.slots) - self.begun) * self.copy.source.memory.block_bytes

    def wake(self) -> None:
        """Tell whoever waits that it is over."""
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def begin_slice(self) -> None:
        """Give the next slice to the mechanism. What that says against it at once is this attempt's error."""
        copy, first, count = self.copy, self.begun, self.next_blocks()
        if not (copy.source.is_current() and copy.target.is_current()):
            self.error = StaleRegion("a region changed hands", copy.request_id, copy.first_block)
            return
        self.begun += count
        part = copy if count == len(copy.source.slots) else copy.part(range(first, first + count))
        under_way = Slice(self, part, first)
        self.under_way[under_way] = None
        try:
            under_way.handle = self.path.submit(part)
        except Exception as problem:
            under_way.let_go()
            self.error = problem
            return
        except BaseException:
            under_way.let_go()
            raise
        under_way.handle.when_answered(under_way.answered)

    def give_up(self) -> None:
        """What has not begun is not begun; what has keeps its slots until it is answered, and nobody listens."""
        self.given_up = True
        self.path.withdraw(self)
        for under_way in list(self.under_way):
            if under_way.handle is not None:
                under_way.handle.cancel()

    def missing(self) -> list[int]:
        """Blocks of the copy, by position, that are not known to be there."""
        there = [False] * len(self.copy.source.slots)
        for first, count, _ in self.arrived:
            there[first : first + count] = [True] * count
        return [position for position, is_there in enumerate(there) if not is_there]

    def result(self) -> CopyResult:
        """Of the copy, every block of which is there."""
        if len(self.arrived) == 1:
            return self.arrived[0][2]
        return joined(self.parts())

    def parts(self) -> list[tuple[Sequence[int], CopyResult]]:
        """What is there: the blocks' positions in the copy, and what came of them."""
        return [(range(first, first + count), result) for first, count, result in self.arrived]


class Slice:
    """Blocks on their way: the second owner of their slots at both ends, from the submission until the answer."""

    __slots__ = ("attempt", "first", "handle", "is_answered", "part")

    def __init__(self, attempt: Attempt, part: Copy, first: int):
        self.attempt = attempt
        self.part = part
        self.first = first
        self.handle: Handle | None = None
        self.is_answered = False
        part.source.memory.hold(part.source)
        part.target.memory.hold(part.target)
        attempt.path.began(part.source.nbytes)

    def let_go(self) -> None:
        self.is_answered = True
        part, attempt = self.part, self.attempt
        del attempt.under_way[self]
        attempt.path.ended(part.source.nbytes)
        part.source.memory.let_go(part.source)
        part.target.memory.let_go(part.target)

    def answered(self, results: list[CopyResult]) -> None:
        """The mechanism's answer. A second one, or one that comes after the attempt was given up, changes nothing but
        who owns the slots."""
        if self.is_answered:
            return
        self.let_go()
        attempt, result = self.attempt, results[0]
        if not attempt.given_up:
            if result.error is None:
                attempt.arrived.append((self.first, len(self.part.source.slots), result))
                attempt.path.moved_bytes += self.part.source.nbytes
            elif attempt.error is None:
                attempt.error = result.error
                attempt.path.withdraw(attempt)  # the rest goes another way
            if attempt.is_over:
                attempt.wake()
        attempt.path.serve()


def joined(parts: Sequence[tuple[Sequence[int], CopyResult]]) -> CopyResult:
    """The result of a copy from those of its parts, each with the positions of its blocks; together all of them, each
    once."""
    total = sum(len(positions) for positions, _ in parts)
    checksums, converted = [b""] * total, [b""] * total
    for positions, result in parts:
        for position, checksum in zip(positions, result.checksums, strict=False):
            checksums[position] = checksum
        for position, checksum in zip(positions, result.converted, strict=False):
            converted[position] = checksum
    return CopyResult(
        None,
        tuple(checksums) if any(result.checksums for _, result in parts) else (),
        tuple(converted) if any(result.converted for _, result in parts) else (),
    )
