"""A peer's region, as the peer itself described it, and as the source of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import AccessRefused, StaleRegion, TransferError
from mcjax.transfer.transports.job import Pieces, copy_pieces
from mcjax.transfer.transports.shm.state import REGIONS
from mcjax.transfer.transports.shm.wire import Malformed, Message

if TYPE_CHECKING:
    from mcjax.transfer.transports.shm.link import Link


class Attachment:
    """A region of a peer's, as the peer itself described it."""

    def __init__(self, link: Link, about: Message, mapped: NDArray[np.uint8] | None):
        self.nbytes = about.number("nbytes")
        self.guarded = about.get("guarded", bool)
        self.mapped = mapped
        self._link = link
        self._line = about.number("line")
        self._incarnation = about.number("incarnation")
        self._base = about.number("address")
        if not self._line < REGIONS or self._base + self.nbytes >= 1 << 64:
            raise Malformed("a region that cannot be")

    def problem(self, epoch: int) -> TransferError | None:
        """Why its bytes must not be copied, or not be believed, by whoever was told of `epoch`."""
        if self._link.lost is not None:
            return self._link.lost
        now = self._link.peer_state.epoch(self._line, self._incarnation)
        if now < 0:
            return AccessRefused("the region was withdrawn")
        if epoch < now or (epoch > now and not self.guarded):
            return StaleRegion(f"the region is in epoch {now}, the descriptor is of epoch {epoch}")
        return None

    def fetch(self, into: NDArray[np.uint8], pieces: Pieces) -> None:
        if self.mapped is not None:
            copy_pieces(self.mapped, into, pieces)
        else:
            with self._link.reading() as memory:
                memory.fetch(into, self._base, pieces)

    def fetch_one(self, into: NDArray[np.uint8], target: int, source: int, nbytes: int) -> None:
        if self.mapped is not None:
            into[target : target + nbytes] = self.mapped[source : source + nbytes]
        else:
            with self._link.reading() as memory:
                memory.fetch_one(into, self._base, target, source, nbytes)


class Foreign:
    """A peer's region as the source of a batch, in the epoch that the batch was told of."""

    guarded = False
    """What has a guard is asked about over the link, before and after the batch."""

    def __init__(self, attachment: Attachment, epoch: int):
        self.nbytes = attachment.nbytes
        self._attachment = attachment
        self._epoch = epoch

    def enter(self) -> TransferError | None:
        return self._attachment.problem(self._epoch)

    def leave(self) -> TransferError | None:
        return self._attachment.problem(self._epoch)

    def allows(self, offset: int, nbytes: int) -> bool:
        return True

    def fetch(self, into: NDArray[np.uint8], pieces: Pieces) -> None:
        self._attachment.fetch(into, pieces)

    def fetch_one(self, into: NDArray[np.uint8], target: int, source: int, nbytes: int) -> None:
        self._attachment.fetch_one(into, target, source, nbytes)
