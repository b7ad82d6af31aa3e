"""The pool's protocols: where blocks lie (stores), who must go (eviction), how full is full (watermarks), and what goes
to the tier below (tiering)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mcjax.transfer.base import Memory, Region
from mcjax.types import BlockId


@dataclass(frozen=True, slots=True)
class Header:
    """What a committed slot says about its bytes. `checksum` is empty in worlds without bytes."""

    block: BlockId
    checksum: bytes = b""


@dataclass(frozen=True, slots=True)
class Stored:
    """A block that a persistent store found in itself when it was opened: its slot, and the block it continues."""

    slot: int
    block: BlockId
    parent: BlockId | None
    checksum: bytes


class BlockStore(Memory, Protocol):
    """Space and headers of one tier on one node. It does no I/O: payload moves only by transports between regions."""

    lossy: bool
    """Whether what it holds may differ from what was computed: its encoding rounds, or that of where it came from."""
    on_space: Callable[[], None]
    """Called when slots that were freed under a transfer have come back; set by whoever hands the slots out."""

    @property
    def free_slots(self) -> int: ...

    @property
    def taken_slots(self) -> int:
        """Slots that somebody was given and has not given back."""
        ...

    def reserve(self, count: int) -> list[int]:
        """Take `count` free slots. Raises `PoolFull` and takes none if there are fewer."""
        ...

    def stage(
        self, slots: Sequence[int], blocks: Sequence[BlockId], checksums: Sequence[bytes], parent: BlockId | None
    ) -> None:
        """What reserved slots are about to be given: a run of one chain behind `parent`. Stores whose transport writes
        headers beside the bytes take them from here; others need not be told."""
        ...

    def commit(
        self,
        slots: Sequence[int],
        blocks: Sequence[BlockId],
        checksums: Sequence[bytes],
        parent: BlockId | None = None,
    ) -> None:
        """The slots' bytes are complete: from now on their headers are visible. `blocks` are a run behind `parent`."""
        ...

    def recovered(self) -> Sequence[Stored]:
        """What was in the store when it was opened, parents first; its slots count as taken. Called once, by the pool,
        which frees what it has no use for. Nothing, where memory does not outlive its process."""
        ...

    def header(self, slot: int) -> Header | None: ...

    def regions(self, slots: Sequence[int]) -> Region: ...

    def free(self, slots: Iterable[int]) -> None:
        """Give slots back; their generation grows, so every region that names them goes stale."""
        ...

    def wipe(self) -> None:
        """The memory is lost: every region is stale, nothing is committed."""
        ...

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every slot is exactly one of free, reserved, committed."""
        ...

    def check_idle(self) -> None:
        """Raise `IntegrityError` if a transfer still holds a slot."""
        ...


class Eviction(Protocol):
    """Orders blocks by how little they would be missed.

    The pool takes, again and again, the first that nothing pins and nothing resident continues.

    Two more methods are called where a strategy has them. `on_extend(blocks)`: the chain that a request holds has grown
    by what it wrote itself; `blocks` is all of it, from its start, and none of it is a hit. `use_cost(cost,
    block_tokens)`: before anything else, in worlds that have a cost model (`mcjax.cost.base.CostModel`), what computing
    a block again would take.
    """

    def on_insert(self, blocks: Sequence[BlockId], parent: BlockId | None) -> None:
        """A run of one chain, in order, was committed together. A suffix should go before its prefix."""
        ...

    def on_hit(self, blocks: Sequence[BlockId]) -> None:
        """A request has found and pinned these blocks, a chain from its start."""
        ...

    def on_remove(self, blocks: Sequence[BlockId]) -> None: ...

    def victims(self) -> Iterator[BlockId]:
        """Every block, in the order they should go. The pool stops when it has enough, and removes nothing before; it
        may also remove nothing at all, and ask again."""
        ...


@dataclass(slots=True)
class TierReading:
    """What a watermark strategy sees of its tier. One object a tier, brought up to date before each question."""

    capacity: int
    """Blocks that the tier can hold."""
    now_ns: int = 0
    free: int = 0
    asked: int = 0
    """Blocks that room was made for so far."""
    saved: int = 0
    """Blocks that the tier below took so far before they left."""
    saving: int = 0
    """Blocks that are on their way there."""
    saves: bool = False
    """Whether there is a tier below that takes what leaves."""
    save_ns: int = 0
    """How long the last ones took, a block; 0 where nothing is below, or none has arrived yet."""
    busy_ns: int = 0
    """For how long any were on their way there, all together: over `saved`, what each costs of the link's time."""
    hits: Sequence[float] = field(default_factory=tuple)
    """The share of its prompt that each of the last requests found here, oldest first."""


class Watermark(Protocol):
    """How full a tier may get, as shares of its capacity: room is made above `high`, down to `low`."""

    def levels(self, reading: TierReading) -> tuple[float, float]:
        """`(low, high)`, as things are."""
        ...


class Saver(Protocol):
    """What knows the tier below: whether a block may leave this one, and how to make that so."""

    def unsaved(self, blocks: Sequence[BlockId]) -> Sequence[BlockId]:
        """Those of `blocks` that must not leave yet: the tier below does not have them, and shall."""
        ...

    def save(self, blocks: Sequence[BlockId]) -> None:
        """Begin to bring `blocks` down (harmless if that has begun). The pool's waiters are woken when it has ended,
        well or not: what could not be saved is not `unsaved` any more."""
        ...

    def on_insert(self, blocks: Sequence[BlockId], parent: BlockId | None) -> None:
        """A run of one chain was committed in the tier above."""
        ...

    def on_hit(self, blocks: Sequence[BlockId]) -> None:
        """A request has found and pinned these blocks above, a chain from its start."""
        ...

    def on_remove(self, blocks: Sequence[BlockId]) -> None:
        """These have left the tier above."""
        ...


class Tiering(Protocol):
    """When blocks go from a tier to the one below. Pure: it is told counts, and answers."""

    @property
    def exclusive(self) -> bool:
        """Whether a block that is promoted leaves the tier below, unless something there continues it."""
        ...

    @property
    def must_save(self) -> bool:
        """Whether a block that is not below must be brought there before it leaves the tier above."""
        ...

    def at_insert(self) -> bool:
        """Whether a block goes down as soon as it is there."""
        ...

    def at_hit(self, hits: int) -> bool:
        """Whether it goes down now that it was hit for the `hits`-th time since it came."""
        ...

    def ahead(self, unsaved: int, capacity: int) -> int:
        """How many blocks to bring down now, in the order of eviction, given how many are not below yet."""
        ...
