"""The pool's protocols: where blocks lie (stores), who must go (eviction), and how full is full (watermarks)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from mcjax.transfer.base import Memory, Region
from mcjax.types import BlockId


@dataclass(frozen=True, slots=True)
class Header:
    """What a committed slot says about its bytes. `checksum` is empty in worlds without bytes."""

    block: BlockId
    checksum: bytes = b""


class BlockStore(Memory, Protocol):
    """Space and headers of one tier on one node. It does no I/O: payload moves only by transports between regions."""

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

    def commit(self, slots: Sequence[int], blocks: Sequence[BlockId], checksums: Sequence[bytes]) -> None:
        """The slots' bytes are complete: from now on their headers are visible."""
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
    """

    def on_insert(self, blocks: Sequence[BlockId], parent: BlockId | None) -> None:
        """A run of one chain, in order, was committed together. A suffix should go before its prefix."""
        ...

    def on_hit(self, blocks: Sequence[BlockId]) -> None:
        """A request has found and pinned these blocks, a chain from its start."""
        ...

    def on_remove(self, blocks: Sequence[BlockId]) -> None: ...

    def victims(self) -> Iterator[BlockId]:
        """Every block, in the order they should go. The pool stops when it has enough, and removes nothing before."""
        ...


class Watermark(Protocol):
    """How full a tier may get, as shares of its capacity: eviction starts above `high` and stops at `low`."""

    def levels(self, history: Sequence[float]) -> tuple[float, float]:
        """`(low, high)`, given the recent share of prompt tokens that hit, oldest first."""
        ...
