"""What moves bytes, and the words it is told in: memories, regions, copies, transports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import TransferError
from mcjax.types import Tier


class Memory(Protocol):
    """A registered buffer divided into equal slots, on one node. Stores are memories.

    `epoch` counts how often slots have changed hands, so that a region that outlived its owner is recognised.
    """

    node: str
    tier: Tier
    name: str
    capacity: int
    block_bytes: int
    epoch: int

    def changed_since(self, epoch: int, slots: Sequence[int]) -> bool:
        """Whether any of the slots has changed hands after the memory's epoch was `epoch`."""
        ...

    def buffer(self) -> NDArray[np.uint8] | None:
        """`[capacity, block_bytes]` bytes, or None where only sizes exist or the bytes are on a device."""
        ...

    def hold(self, region: Region) -> None:
        """A transfer in flight owns these slots too: they are not handed out again until `let_go`."""
        ...

    def let_go(self, region: Region) -> None:
        """The end of one `hold` of this very region."""
        ...


# Regions, copies and results are made for every move; frozen ones would take several times as long to make.


@dataclass(slots=True, eq=False)
class Region:
    """Slots of one memory, in the hands they were in at `epoch` of it. Made by the memory (`BlockStore.regions`).

    Nobody sets a field. Only `is_current` moves `epoch` on, to the last one at which it found the slots unchanged, so
    that while nothing at all changes hands, looking again costs one comparison.
    """

    memory: Memory
    slots: tuple[int, ...]
    epoch: int

    @property
    def nbytes(self) -> int:
        return len(self.slots) * self.memory.block_bytes

    def is_current(self) -> bool:
        """False once any slot has changed hands: its bytes must then be neither read nor written."""
        memory = self.memory
        # Read first: on another thread than the one that frees slots, what changes during the look is found next time.
        epoch = memory.epoch
        if epoch != self.epoch:
            if memory.changed_since(self.epoch, self.slots):
                return False
            self.epoch = epoch
        return True


@dataclass(slots=True)
class Copy:
    """One span from region to region, slot by slot. `checksum` asks for a checksum of each block as read.

    Where transports have classes, the higher `priority` goes first.
    """

    source: Region
    target: Region
    request_id: int = -1
    first_block: int = -1
    checksum: bool = False
    priority: int = 0


@dataclass(slots=True)
class CopyResult:
    """The end of one copy: an error, or (when asked for) one checksum a block."""

    error: TransferError | None = None
    checksums: tuple[bytes, ...] = ()


@dataclass(slots=True)
class TransportStats:
    """Counters since the transport was made."""

    bytes_moved: int = 0
    copies: int = 0
    errors: int = 0
    pending_bytes: int = 0


class Handle(Protocol):
    """A submitted batch."""

    def when_answered(self, callback: Callable[[list[CopyResult]], object]) -> None:
        """Have `callback` called with one result a copy, in order: once, on the loop, right now if there is an answer.

        There always will be one, cancelled or not, since the slots are owned by the transfer until then.
        """
        ...

    def cancel(self) -> None:
        """Give the batch up. Bytes may still land in targets whose region is current; nobody is told."""
        ...


class Transport(Protocol):
    """One way to move bytes. Procedures never call it directly: the transfer engine chooses and guards."""

    name: str

    def register(self, memory: Memory) -> None:
        """Make a memory known; copies that touch any other, or slots outside it, are refused."""
        ...

    def deregister(self, memory: Memory) -> None: ...

    def reaches(self, source: Memory, target: Memory) -> bool: ...

    def submit(self, copies: list[Copy], priority: int = 0) -> Handle:
        """Start a batch. One of higher `priority` goes first, where the transport has classes at all."""
        ...

    def stats(self) -> TransportStats: ...


@dataclass(slots=True)
class FutureHandle:
    """The plain handle: a future that the mechanism resolves, and a flag that it may look at."""

    future: asyncio.Future[list[CopyResult]]
    cancelled: bool = field(default=False)

    def when_answered(self, callback: Callable[[list[CopyResult]], object]) -> None:
        if self.future.done():
            callback(self.future.result())
        else:
            self.future.add_done_callback(lambda future: callback(future.result()))

    def cancel(self) -> None:
        self.cancelled = True
