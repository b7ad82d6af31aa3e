"""A block stream: one request's blocks on their way into a pool, in order, while they are still being produced."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mcjax import aio
from mcjax.engine.node import Node
from mcjax.errors import TransferError
from mcjax.kvpool.holds import Pin, Reservation
from mcjax.transfer.base import Copy, Region


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Blocks `first .. first + len(region.slots)` of a prompt. One beyond its full blocks is the private tail."""

    first: int
    region: Region
    checksums: tuple[bytes, ...] = ()


class BlockStream:
    """Moves pieces one after the other from `sender`'s memory into slots reserved at `target`, and commits each.

    What arrives is handed on with `on_arrival`, so that streams can be chained: device to own pool to the next node's.
    With `checksum`, blocks are checksummed as they are read, and committed with that; else with what a piece came with.
    """

    def __init__(
        self,
        sender: Node,
        target: Node,
        blocks: tuple[int, ...],
        reservation: Reservation,
        pin: Pin,
        checksum: bool,
        on_arrival: Callable[[Piece], None] = lambda piece: None,
    ):
        self._sender = sender
        self._target = target
        self._blocks = blocks
        self._reservation = reservation
        self._pin = pin
        self._checksum = checksum
        self._on_arrival = on_arrival
        self._pieces: deque[Piece] = deque()
        self._wake = aio.Signal(f"{sender.name}>{target.name}.stream")
        self._closed = False

    def push(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._wake.set()

    def close(self) -> None:
        """No more pieces: `run` returns when those pushed have arrived."""
        self._closed = True
        self._wake.set()

    async def run(self) -> None:
        """Raises `TransferError` or `LeaseLost` when a piece cannot be brought to its end."""
        while True:
            while self._pieces:
                await self._send(self._pieces.popleft())
            if self._closed:
                return
            await self._wake.wait()

    async def _send(self, piece: Piece) -> None:
        pool, owner, count = self._target.pool, self._reservation.owner, len(piece.region.slots)
        span = self._blocks[piece.first : piece.first + count]
        self._reservation.check()
        target = pool.store.regions(self._reservation.slots[:count])
        copy = Copy(piece.region, target, owner, span[0] if span else -1, checksum=self._checksum)
        checksums = await self._sender.move(copy) or piece.checksums
        self._reservation.check()
        arrived = target
        if span:
            parent = self._blocks[piece.first - 1] if piece.first else None
            slots = pool.commit(self._reservation, span, parent, checksums)
            if slots is None:
                raise TransferError("the prefix it continues is no longer resident", owner, span[0])
            pool.deepen(self._pin, self._blocks[: piece.first + len(span)])
            # The tail stays in its reserved slot: nobody else may ever match it.
            where = (*slots, *target.slots[len(span) :])
            if where != target.slots:
                arrived = pool.store.regions(where)
        self._on_arrival(Piece(piece.first, arrived, checksums))
