"""A block stream: one request's blocks on their way into a pool, in order, while they are still being produced."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mcjax import aio
from mcjax.engine.node import Node
from mcjax.engine.prefix import verify
from mcjax.errors import StaleRegion, TransferError
from mcjax.kvpool.holds import Pin, Reservation
from mcjax.transfer.base import Copy, Region


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Blocks `first .. first + len(region.slots)` of a prompt. One beyond its full blocks is the private tail.

    `unverified`: the sender's pool has them, and nobody has compared them with `checksums` lately.
    """

    first: int
    region: Region
    checksums: tuple[bytes, ...] = ()
    unverified: bool = False


class BlockStream:
    """Moves pieces one after the other from `sender`'s memory into slots reserved at `target`, and commits each.

    What arrives is handed on with `on_arrival`, so that streams can be chained: device to own pool to the next node's.
    With `checksum`, blocks are checksummed on their way, and committed with that; else with what a piece came with.
    `lossy`: they were computed from rounded blocks. `at_once`: nothing moves before `close`, and then what lies side by
    side in one copy, as it would be if prefill knew nothing of streaming.
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
        lossy: bool = False,
        at_once: bool = False,
    ):
        self._sender = sender
        self._target = target
        self._blocks = blocks
        self._reservation = reservation
        self._pin = pin
        self._checksum = checksum
        self._lossy = lossy
        self._at_once = at_once
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
        """Raises `TransferError` or `LeaseLost` when a piece cannot be brought to its end; `BlockCorrupt`, when it was
        not what it says to begin with."""
        while self._at_once and not self._closed:
            await self._wake.wait()
        if self._at_once:
            self._join()
        while True:
            while self._pieces:
                await self._send(self._pieces.popleft())
            if self._closed:
                return
            await self._wake.wait()

    def _join(self) -> None:
        """Make one piece of those that continue each other. Raises `StaleRegion` if one has changed hands meanwhile."""
        waiting, self._pieces = self._pieces, deque()
        for piece in waiting:
            if not piece.region.is_current():
                raise StaleRegion("a region changed hands before it was sent", self._reservation.owner)
            last = self._pieces[-1] if self._pieces else None
            if (
                last is None
                or last.unverified != piece.unverified
                or last.first + len(last.region.slots) != piece.first
            ):
                self._pieces.append(piece)
                continue
            region = self._sender.pool.store.regions((*last.region.slots, *piece.region.slots))
            checksums = tuple(sum_ for one in (last, piece) for sum_ in one.checksums or (b"",) * len(one.region.slots))
            self._pieces[-1] = Piece(last.first, region, checksums, last.unverified)

    async def _send(self, piece: Piece) -> None:
        pool, owner, count = self._target.pool, self._reservation.owner, len(piece.region.slots)
        span = self._blocks[piece.first : piece.first + count]
        self._reservation.check()
        target = pool.store.regions(self._reservation.slots[:count])
        checksum = self._checksum or piece.unverified
        moved = await self._sender.perform(
            Copy(piece.region, target, owner, span[0] if span else -1, checksum=checksum)
        )
        if piece.unverified:
            verify(self._sender.pool, moved.checksums, piece.checksums, span, owner)
        checksums = moved.written or piece.checksums
        self._reservation.check()
        arrived = target
        if span:
            parent = self._blocks[piece.first - 1] if piece.first else None
            slots = pool.commit(self._reservation, span, parent, checksums, self._lossy)
            if slots is None:
                raise TransferError("the prefix it continues is no longer resident", owner, span[0])
            pool.deepen(self._pin, self._blocks[: piece.first + len(span)])
            # The tail stays in its reserved slot: nobody else may ever match it.
            where = (*slots, *target.slots[len(span) :])
            if where != target.slots:
                arrived = pool.store.regions(where)
                # Another rendering of a block may lie there, equal but for rounding.
                checksums = (*pool.checksums(span), *checksums[len(span) :])
        self._on_arrival(Piece(piece.first, arrived, checksums))
