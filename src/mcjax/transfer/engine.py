"""The transfer engine: chooses a transport for a copy, waits no longer than the deadline, and retries what was lost.

While a copy is in flight both regions' slots have a second owner, the transfer; so a request that gives up cannot make
a late write land in somebody else's block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mcjax import aio
from mcjax.errors import ConfigError, DeadlineExceeded, StaleRegion, TransferError
from mcjax.transfer.base import Copy, CopyResult, Memory, Region, Transport
from mcjax.types import NS_PER_S, Recorder


class TransferEngine:
    """Moves spans between regions. `deadline_s` bounds one attempt; `attempts` counts them all."""

    def __init__(
        self, transports: Sequence[Transport], recorder: Recorder, deadline_s: float = 60.0, attempts: int = 3
    ):
        if not deadline_s > 0:
            raise ConfigError("transfer.deadline_s", deadline_s, "must be more than 0 seconds")
        if attempts < 1:
            raise ConfigError("transfer.attempts", attempts, "must be at least 1")
        self.transports = list(transports)
        self._recorder = recorder
        self._deadlines = aio.Deadlines(round(deadline_s * NS_PER_S))
        self._attempts = attempts
        self._labels: dict[tuple[Memory, Memory], tuple[str, str]] = {}
        """What the log calls a way: nodes and tiers."""

    def register(self, memory: Memory) -> None:
        for transport in self.transports:
            transport.register(memory)

    def deregister(self, memory: Memory) -> None:
        for transport in self.transports:
            transport.deregister(memory)
        self._labels = {way: labels for way, labels in self._labels.items() if memory not in way}

    async def move(self, copy: Copy) -> tuple[bytes, ...]:
        """Move one span; returns its checksums (if the copy asks for them and the world has bytes).

        Raises:
            StaleRegion: source or target changed hands; never retried.
            TransferError: still not there after every attempt.
        """
        source, target = copy.source.memory, copy.target.memory
        transport = self._choose(copy)
        clock = aio.clock()
        start_ns = clock.now_ns()
        for attempt in range(1, self._attempts + 1):
            try:
                result = await self._once(transport, copy)
            except DeadlineExceeded:
                result = CopyResult(TransferError("no answer within the deadline", copy.request_id, copy.first_block))
            error = result.error
            nodes, tiers = self._labels.get((source, target)) or self._label(source, target)
            self._recorder.event(
                clock.now_ns(),
                "transfer" if error is None else "transfer_failed",
                copy.request_id,
                nodes,
                tier=tiers,
                first_block=copy.first_block,
                blocks=len(copy.source.slots),
                nbytes=copy.source.nbytes,
                start_ns=start_ns,
                detail=transport.name if error is None else f"{transport.name}: {type(error).__name__}",
            )
            if error is None:
                return result.checksums
            start_ns = clock.now_ns()
            if isinstance(error, StaleRegion) or attempt == self._attempts:
                raise error
        raise AssertionError("unreachable")

    async def _once(self, transport: Transport, copy: Copy) -> CopyResult:
        source, target = copy.source, copy.target
        if not (source.is_current() and target.is_current()):
            return CopyResult(StaleRegion("a region changed hands", copy.request_id, copy.first_block))
        in_flight = _InFlight(source, target)
        try:
            handle = transport.submit([copy], copy.priority)
        except BaseException:
            in_flight.let_go()
            raise
        handle.when_answered(in_flight.answered)
        if in_flight.result is None:
            in_flight.waiter = waiter = self._deadlines.waiter()
            try:
                await waiter
            except asyncio.CancelledError:
                handle.cancel()
                raise
        if in_flight.result is None:
            handle.cancel()
            raise DeadlineExceeded(f"nothing within {self._deadlines.patience_ns / NS_PER_S:g} s")
        return in_flight.result

    def _choose(self, copy: Copy) -> Transport:
        for transport in self.transports:
            if transport.reaches(copy.source.memory, copy.target.memory):
                return transport
        raise TransferError(
            f"no transport reaches from {copy.source.memory.name} to {copy.target.memory.name}",
            copy.request_id,
            copy.first_block,
        )

    def _label(self, source: Memory, target: Memory) -> tuple[str, str]:
        labels = self._labels[source, target] = (f"{source.node}>{target.node}", f"{source.tier}>{target.tier}")
        return labels


class _InFlight:
    """The second owner of both regions' slots, from the submission until the mechanism has answered.

    The caller awaits `waiter` and nothing of the mechanism's, so that cancelling the caller leaves that as it is.
    """

    __slots__ = ("result", "source", "target", "waiter")

    def __init__(self, source: Region, target: Region):
        self.source = source
        self.target = target
        self.result: CopyResult | None = None
        self.waiter: asyncio.Future[None] | None = None
        source.memory.hold(source)
        target.memory.hold(target)

    def let_go(self) -> None:
        self.source.memory.let_go(self.source)
        self.target.memory.let_go(self.target)

    def answered(self, results: list[CopyResult]) -> None:
        self.let_go()
        self.result = results[0]
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
