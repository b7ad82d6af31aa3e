"""The transfer engine: chooses a transport for a copy, waits no longer than the deadline, and retries what was lost.

While a copy is in flight both regions' slots have a second owner, the transfer; so a request that gives up cannot make
a late write land in somebody else's block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mcjax import aio
from mcjax.errors import ConfigError, DeadlineExceeded, StaleRegion, TransferError
from mcjax.transfer.base import Copy, CopyResult, Memory, Transport
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
        self._deadline_ns = round(deadline_s * NS_PER_S)
        self._attempts = attempts

    def register(self, memory: Memory) -> None:
        for transport in self.transports:
            transport.register(memory)

    def deregister(self, memory: Memory) -> None:
        for transport in self.transports:
            transport.deregister(memory)

    async def move(self, copy: Copy) -> tuple[bytes, ...]:
        """Move one span; returns its checksums (if the copy asks for them and the world has bytes).

        Raises:
            StaleRegion: source or target changed hands; never retried.
            TransferError: still not there after every attempt.
        """
        transport = self._choose(copy)
        start_ns = aio.now_ns()
        for attempt in range(1, self._attempts + 1):
            try:
                result = await self._once(transport, copy)
            except DeadlineExceeded:
                result = CopyResult(TransferError("no answer within the deadline", copy.request_id, copy.first_block))
            if result.error is None:
                now_ns = aio.now_ns()
                self._recorder.event(
                    now_ns,
                    "transfer",
                    copy.request_id,
                    f"{copy.source.memory.node}>{copy.target.memory.node}",
                    tier=f"{copy.source.memory.tier}>{copy.target.memory.tier}",
                    first_block=copy.first_block,
                    blocks=len(copy.source.slots),
                    nbytes=copy.source.nbytes,
                    start_ns=start_ns,
                    detail=transport.name,
                )
                return result.checksums
            if isinstance(result.error, StaleRegion) or attempt == self._attempts:
                raise result.error
        raise AssertionError("unreachable")

    async def _once(self, transport: Transport, copy: Copy) -> CopyResult:
        source, target = copy.source, copy.target
        if not (source.is_current() and target.is_current()):
            return CopyResult(StaleRegion("a region changed hands", copy.request_id, copy.first_block))
        source.memory.hold(source.slots)
        target.memory.hold(target.slots)

        def let_go(_: object) -> None:
            source.memory.let_go(source.slots)
            target.memory.let_go(target.slots)

        try:
            handle = transport.submit([copy])
        except BaseException:
            let_go(None)
            raise
        handle.future.add_done_callback(let_go)
        try:
            results = await aio.within(aio.now_ns() + self._deadline_ns, handle.future)
        except (DeadlineExceeded, asyncio.CancelledError):
            handle.cancel()
            raise
        return results[0]

    def _choose(self, copy: Copy) -> Transport:
        for transport in self.transports:
            if transport.reaches(copy.source.memory, copy.target.memory):
                return transport
        raise TransferError(
            f"no transport reaches from {copy.source.memory.name} to {copy.target.memory.name}",
            copy.request_id,
            copy.first_block,
        )
