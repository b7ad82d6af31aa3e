"""What a request may hold in a pool: a pin on resident blocks, or slots reserved for blocks that are on their way.

A hold given to another node is a lease: it lives by that node's heartbeat and is lost when the heartbeat stops.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mcjax.errors import LeaseLost
from mcjax.types import BlockId


@dataclass(slots=True, eq=False)
class Anchor:
    """A block that one or more pins end at. Neither it nor what it continues can be evicted."""

    block: BlockId
    slot: int
    pins: int = 0
    detached: bool = False
    """Out of the index (found corrupt), kept only until the last pin is released."""


@dataclass(slots=True, eq=False)
class Hold:
    """Owned by a request; `expires_ns` is None for a holder on the pool's own node."""

    node: str
    owner: int
    expires_ns: int | None = None
    released: bool = False
    lost: bool = False

    def check(self) -> None:
        """Raises `LeaseLost` if the hold is gone, taken back or released: so a late completion finds out."""
        if self.lost or self.released:
            raise LeaseLost(self.node, self.owner)


@dataclass(slots=True, eq=False)
class Pin(Hold):
    """A resident prefix that must stay: one anchor, its deepest block, since only leaves are evicted."""

    blocks: tuple[BlockId, ...] = ()
    deepest: Anchor | None = None
    accepts_lossy: bool = True
    """Whether it may cover lossy blocks."""

    def __len__(self) -> int:
        return len(self.blocks)


@dataclass(slots=True, eq=False)
class Reservation(Hold):
    """Slots without visible blocks. They are committed in order, as blocks of `tenant`, or given back."""

    tenant: str = ""
    slots: list[int] = field(default_factory=list[int])

    def __len__(self) -> int:
        return len(self.slots)
