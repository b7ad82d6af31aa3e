"""What moves bytes, and the words it is told in: memories, regions, copies, transports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import TransferError
from mcjax.transfer.layout.describe import Layout
from mcjax.types import Packer, Tier


class Memory(Protocol):
    """A registered buffer divided into equal slots, on one node. Stores are memories.

    `epoch` counts how often slots have changed hands, so that a region that outlived its owner is recognised.
    """

    node: str
    tier: Tier
    name: str
    capacity: int
    block_bytes: int
    """Of a block as it rests here."""
    packer: Packer
    """How blocks rest here. A copy between memories of different encodings converts on its way."""
    layout: Layout | None
    """How a block's numbers lie, for whoever joins to be compared with and for peers; None where there are none that a
    model made."""
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

    def settle(self, slots: Sequence[int]) -> None:
        """All that was to come into these slots is there: every region made of them before is stale, so that a repeated
        copy cannot land on what has been verified, and perhaps changed, since."""
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

    The higher `priority` goes first: where transports have classes, there; else in the engine's queue. With
    `deadline_ns`, an instant, it is worth nothing any more from then on, whatever attempts are left.
    """

    source: Region
    target: Region
    request_id: int = -1
    first_block: int = -1
    checksum: bool = False
    priority: int = 0
    deadline_ns: int | None = None

    def part(self, positions: Sequence[int]) -> Copy:
        """The blocks at `positions` of this one, in that order: a copy of its own, of the same epochs."""
        source, target = self.source, self.target
        return Copy(
            Region(source.memory, tuple(source.slots[at] for at in positions), source.epoch),
            Region(target.memory, tuple(target.slots[at] for at in positions), target.epoch),
            self.request_id,
            self.first_block,
            self.checksum,
            self.priority,
            self.deadline_ns,
        )


@dataclass(slots=True)
class CopyResult:
    """The end of one copy: an error, or (when asked for) one checksum a block."""

    error: TransferError | None = None
    checksums: tuple[bytes, ...] = ()
    """Of the bytes that were read: what says whether the source was what it should be."""
    converted: tuple[bytes, ...] = ()
    """Of the bytes that were written, where source and target differ in encoding; empty where they are the same."""

    @property
    def written(self) -> tuple[bytes, ...]:
        """Checksums of what lies in the target now: what a commit of it records."""
        return self.converted or self.checksums


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


@dataclass(frozen=True, slots=True)
class Pacing:
    """How a transport wants to be fed that takes what it is given in order of arrival: no copy larger than
    `slice_bytes`, and no more than `window_bytes` at a time on one path. What waits then waits in the engine, by class.
    """

    slice_bytes: int
    window_bytes: int


@dataclass(frozen=True, slots=True)
class Rail:
    """One of several ways that a transport has from one memory to another: out by one NIC, in by another.

    Rails of one transport with the same `local` and `remote` share a queue, a health and an estimate; so a transport
    with peers that fail one by one names the peer in `remote`, even if each has one NIC only.
    """

    local: str = ""
    remote: str = ""
    distance: int = 0
    """NUMA distance between each memory and its NIC, beyond what is local, both ends together."""
    crosses: bool = False
    """Whether it leaves the switch domain."""
    bytes_per_s: float | None = None
    """What it is made for; None: as much as the world says of a link."""
    spare: bool = False
    """Shares its NICs with other rails between the same memories: taken only while none of those is well."""


class Transport(Protocol):
    """One way to move bytes. Procedures never call it directly: the transfer engine chooses and guards.

    One that says no more takes whole copies at once, and orders them itself. It may say more: by an attribute `pacing:
    Pacing`, that copies shall wait in the engine; by having `rails`, that there are several ways (`RailedTransport`).
    """

    name: str

    def register(self, memory: Memory) -> None:
        """Make a memory known; copies that touch any other, or slots outside it, are refused."""
        ...

    def deregister(self, memory: Memory) -> None: ...

    def reaches(self, source: Memory, target: Memory) -> bool:
        """Asked once a pair of memories, until one is registered or deregistered."""
        ...

    def submit(self, copies: list[Copy], priority: int = 0) -> Handle:
        """Start a batch. One of higher `priority` goes first, where the transport has classes at all."""
        ...

    def stats(self) -> TransportStats: ...


@runtime_checkable
class RailedTransport(Protocol):
    """What a transport has beside, if several ways lead from memory to memory. Which a copy takes is the engine's
    business (`transfer.paths`)."""

    name: str

    def rails(self, source: Memory, target: Memory) -> Sequence[Rail]:
        """The ways between two memories that it reaches: one or more. Asked as often as `reaches`."""
        ...

    def submit(self, copies: list[Copy], priority: int = 0, rail: Rail | None = None) -> Handle:
        """Start a batch on one of its rails; None: on whichever it likes."""
        ...


@dataclass(slots=True, eq=False)
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
