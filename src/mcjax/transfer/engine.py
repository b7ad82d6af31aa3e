"""The transfer engine: which paths a copy takes, how long it may take there, and where it goes when one fails.

While blocks are in flight the slots at both ends have a second owner, the transfer (`paths.attempt.Slice`); so a
request that gives up cannot make a late write land in somebody else's block.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from typing import Any

from mcjax import aio
from mcjax.errors import ConfigError, StaleRegion, TransferError, TransferTimeout, Unencodable
from mcjax.transfer.base import Copy, CopyResult, Memory, Rail, RailedTransport, Transport
from mcjax.transfer.paths.attempt import Attempt, joined
from mcjax.transfer.paths.base import PathChoice
from mcjax.transfer.paths.figures import figures_of
from mcjax.transfer.paths.least_queued import LeastQueued
from mcjax.transfer.paths.path import Path, PathSettings
from mcjax.transfer.paths.way import Lane, Way
from mcjax.types import NS_PER_S, Recorder


class TransferEngine:
    """Moves spans between regions. `deadline_s` bounds one attempt; `attempts` counts those of each block."""

    def __init__(
        self,
        transports: Sequence[Transport],
        recorder: Recorder,
        deadline_s: float = 60.0,
        attempts: int = 3,
        choice: PathChoice | None = None,
        settings: PathSettings | None = None,
    ):
        if not deadline_s > 0:
            raise ConfigError("transfer.deadline_s", deadline_s, "must be more than 0 seconds")
        if attempts < 1:
            raise ConfigError("transfer.attempts", attempts, "must be at least 1")
        self.transports = list(transports)
        self.paths: dict[tuple[int, str, str], Path] = {}
        """Every path that some copy could have taken, by its transport's number and the ends of its rail."""
        self._choice = choice or LeastQueued()
        self._settings = settings or PathSettings()
        self._recorder = recorder
        self._deadlines = aio.Deadlines(round(deadline_s * NS_PER_S))
        self._attempts = attempts
        self._ways: dict[tuple[Memory, Memory], Way] = {}

    @property
    def in_flight(self) -> int:
        """Slices that a mechanism has not answered yet, whoever still waits for them."""
        return sum(path.in_flight for path in self.paths.values())

    def register(self, memory: Memory) -> None:
        self._ways.clear()
        for transport in self.transports:
            transport.register(memory)

    def deregister(self, memory: Memory) -> None:
        self._ways.clear()
        for transport in self.transports:
            transport.deregister(memory)

    async def move(self, copy: Copy) -> tuple[bytes, ...]:
        """`perform`, for whom only the checksums of what was read are of interest."""
        return (await self.perform(copy)).checksums

    async def perform(self, copy: Copy) -> CopyResult:
        """Move one span; the result has its checksums (if the copy asks for them and the world has bytes), and no
        error.

        Raises:
            StaleRegion: source or target changed hands; never retried.
            Unencodable: the target's encoding does not take it; never retried.
            TransferTimeout: `copy.deadline_ns` has passed.
            TransferError: still not there after every attempt.
        """
        source, target = copy.source.memory, copy.target.memory
        way = self._ways.get((source, target)) or self._find_way(source, target)
        if way.only is not None:
            return await self._carry(copy, way, way.only)
        return await self._divide(copy, way)

    async def perform_all(self, copies: Sequence[Copy]) -> list[CopyResult]:
        """Move several spans side by side: a typed result each, in order; one that fails fails alone."""
        return await _side_by_side([self._result(copy) for copy in copies])

    def estimate(self, nbytes: int, source: Memory, target: Memory) -> float:
        """Seconds that a copy of `nbytes` would take if it began now, by what its paths have learned, and behind what
        waits for them. Raises `TransferError` where no transport reaches."""
        way = self._ways.get((source, target)) or self._find_way(source, target)
        lanes = way.usable(aio.now_ns())
        counts = self._counts(max(1, -(-nbytes // source.block_bytes)), source.block_bytes, lanes)
        each = nbytes / sum(counts)
        return max(
            lane.path.estimate.seconds(round(each * count) + lane.path.queued_bytes)
            for lane, count in zip(lanes, counts, strict=True)
            if count
        )

    def figures(self) -> dict[str, Any]:
        """What each path has done, by the transport or NIC that it leaves by, for a summary."""
        return {group: figures.for_summary() for group, figures in figures_of(self.paths.values()).items()}

    async def _result(self, copy: Copy) -> CopyResult:
        try:
            return await self.perform(copy)
        except TransferError as problem:
            return CopyResult(problem)

    async def _divide(self, copy: Copy, way: Way, tried: tuple[Path, ...] = ()) -> CopyResult:
        """Send a copy over the paths that the strategy chooses, a part over each."""
        lanes = way.usable(aio.now_ns(), tried)
        blocks = len(copy.source.slots)
        counts = self._counts(blocks, copy.source.memory.block_bytes, lanes)
        ends = list(itertools.accumulate(counts))
        parts = [
            (range(end - count, end), lane.path) for lane, count, end in zip(lanes, counts, ends, strict=True) if count
        ]
        if len(parts) == 1:
            return await self._carry(copy, way, parts[0][1], tried)
        results = await _side_by_side([self._carry(copy.part(where), way, path, tried) for where, path in parts])
        return joined([(where, result) for (where, _), result in zip(parts, results, strict=True)])

    async def _carry(self, copy: Copy, way: Way, path: Path, tried: tuple[Path, ...] = ()) -> CopyResult:
        """Send a copy, or a part of one, over one path; what does not arrive goes another way, if there is one."""
        clock = aio.clock()
        start_ns = clock.now_ns()
        attempt = Attempt(path, copy)
        is_probe = path.health.begin(start_ns)
        try:
            await self._once(attempt)
        finally:
            now_ns = clock.now_ns()
            path.settle(attempt, now_ns - start_ns, now_ns, is_probe)
        self._record(attempt, way, start_ns, now_ns)
        error = attempt.error
        if error is None:
            return attempt.result()
        tried = (*tried, path)
        if (
            not isinstance(error, TransferError)
            or isinstance(error, StaleRegion | Unencodable)
            or len(tried) == self._attempts
            or (copy.deadline_ns is not None and now_ns >= copy.deadline_ns)
        ):
            raise error
        again = len(tried) - len(way.lanes) + 1
        if again > 0 and not isinstance(error, TransferTimeout):  # else the path has had its rest already
            await aio.sleep_ns(self._settings.patience.pause_ns(again))
        if not attempt.arrived:
            return await self._divide(copy, way, tried)
        rest = attempt.missing()
        return joined([*attempt.parts(), (rest, await self._divide(copy.part(rest), way, tried))])

    async def _once(self, attempt: Attempt) -> None:
        """Wait until an attempt is over, or its time is up."""
        attempt.path.enter(attempt)
        if attempt.is_over:
            return
        copy = attempt.copy
        attempt.waiter = waiter = self._deadlines.waiter()
        timer = None if copy.deadline_ns is None else aio.clock().call_at_ns(copy.deadline_ns, attempt.wake)
        try:
            await waiter
        except asyncio.CancelledError:
            attempt.give_up()
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if not attempt.is_over:
            attempt.give_up()
            attempt.error = TransferTimeout("no answer within the deadline", copy.request_id, copy.first_block)

    def _record(self, attempt: Attempt, way: Way, start_ns: int, now_ns: int) -> None:
        """An event for what arrived, one for what did not."""
        blocks, error, path = len(attempt.copy.source.slots), attempt.error, attempt.path.name
        if error is None:
            self._tell("transfer", attempt.copy, blocks, path, way, start_ns, now_ns)
            return
        arrived = sum(count for _, count, _ in attempt.arrived)
        if arrived:
            self._tell("transfer", attempt.copy, arrived, path, way, start_ns, now_ns)
        why = f"{path}: {type(error).__name__}"
        self._tell("transfer_failed", attempt.copy, blocks - arrived, why, way, start_ns, now_ns)

    def _tell(self, kind: str, copy: Copy, blocks: int, detail: str, way: Way, start_ns: int, now_ns: int) -> None:
        self._recorder.event(
            now_ns,
            kind,
            copy.request_id,
            way.nodes,
            tier=way.tiers,
            first_block=copy.first_block,
            blocks=blocks,
            nbytes=blocks * copy.source.memory.block_bytes,
            start_ns=start_ns,
            detail=detail,
        )

    def _counts(self, blocks: int, block_bytes: int, lanes: Sequence[Lane]) -> Sequence[int]:
        """How many blocks go by each of the lanes."""
        if len(lanes) == 1:
            return (blocks,)
        counts = self._choice.choose(blocks, block_bytes, [lane.candidate() for lane in lanes])
        if len(counts) != len(lanes) or min(counts) < 0 or sum(counts) != blocks:
            problem = f"gave {list(counts)} for {blocks} blocks and {len(lanes)} paths"
            raise ConfigError("transfer.paths", type(self._choice).__name__, problem)
        return counts

    def _find_way(self, source: Memory, target: Memory) -> Way:
        """Every lane from memory to memory. Raises `TransferError` if there is none."""
        lanes: list[Lane] = []
        for rank, transport in enumerate(self.transports):
            if transport.reaches(source, target):
                rails = transport.rails(source, target) if isinstance(transport, RailedTransport) else (Rail(),)
                lanes += [Lane(self._path(rank, rail), rail) for rail in rails]
        if not lanes:
            raise TransferError(f"no transport reaches from {source.name} to {target.name}")
        way = self._ways[source, target] = Way(source, target, lanes)
        return way

    def _path(self, rank: int, rail: Rail) -> Path:
        key = (rank, rail.local, rail.remote)
        found = self.paths.get(key)
        if found is None:
            found = self.paths[key] = Path(self.transports[rank], rail, rank, self._settings)
        return found


async def _side_by_side(procedures: Sequence[Coroutine[Any, Any, CopyResult]]) -> list[CopyResult]:
    """Their results, in order. The first that raises ends the others."""
    async with aio.Scope("copies") as scope:
        tasks = [scope.spawn(procedure, f"copy {index}") for index, procedure in enumerate(procedures)]

        async def all_of_them() -> list[CopyResult]:
            return [await task for task in tasks]

        try:
            return await scope.run(all_of_them())
        finally:
            for task in tasks:
                await aio.settle(task)  # of several that failed, the first is told of
