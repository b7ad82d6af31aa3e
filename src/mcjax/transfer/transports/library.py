"""What endpoints over other people's transfer libraries share: registered regions, and bytes that move one-sidedly.

Nothing of ours runs on the peer's side, so what the peer would check (keys, epochs, guards, a secret) is not checked,
and a library's status is one for a whole batch. `Capabilities` say so. What one side can check alone is checked here.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import AccessRefused, TransferTimeout
from mcjax.transfer.transports.copying import digest_of
from mcjax.transfer.transports.endpoint import Exposed, Guard, RegionDescriptor, Spans
from mcjax.transfer.transports.lanes import Batch, LaneEndpoint
from mcjax.transfer.transports.regions import Region, Regions


class RegisteredRegion(Region):
    """A region that a library knows. `registration`: what it calls it."""

    def __init__(
        self,
        address: str,
        buffer: NDArray[np.uint8],
        writable: bool,
        layout: Mapping[str, Any] | None,
        detail: Callable[[RegisteredRegion], dict[str, Any]],
    ):
        super().__init__(address, buffer, writable, None, layout)
        self.base = buffer.ctypes.data
        """Its address in this process."""
        self.registration: Any = None
        self._detail = detail

    def detail(self) -> dict[str, Any]:
        return {"base": self.base, **self._detail(self)}


def remote_base(remote: RegionDescriptor) -> int:
    """The address of a region in its own process. Raises `AccessRefused` for a descriptor without one."""
    base = remote.detail.get("base")
    if type(base) is not int or not 0 < base < 1 << 62:
        raise AccessRefused("the descriptor has no address of the region in it")
    return base


class LibraryEndpoint(LaneEndpoint[RegisteredRegion]):
    """An endpoint whose bytes a library moves.

    A batch that the library has begun is answered when the library is done with it, not before: it might still write
    into the local region.
    """

    def __init__(self, address: str, idle_s: float):
        super().__init__(address, idle_s)
        self._regions: Regions[RegisteredRegion] = Regions()

    # What a library does. Called from any thread.

    @abstractmethod
    def _register(self, region: RegisteredRegion) -> None:
        """Make the region known to the library. Raises `AccessRefused`."""

    @abstractmethod
    def _deregister(self, region: RegisteredRegion) -> None: ...

    def _detail(self, region: RegisteredRegion) -> dict[str, Any]:
        """What a peer's library needs of a region beside its address."""
        return {}

    @abstractmethod
    def _transfer(self, batch: Batch[RegisteredRegion], local: NDArray[np.int64], remote: NDArray[np.int64]) -> None:
        """Move the spans, whose addresses are `local` and `remote` (`[n]` each); returns when they are there.

        Raises a `TransferError` that holds for all of them, and then too the library is done with the local region.
        Gives up (`TransferCancelled`) when the endpoint closes.
        """

    @abstractmethod
    def _shut_down(self) -> None:
        """End the library: it touches no memory any more when this returns."""

    # The endpoint.

    def expose(
        self,
        buffer: NDArray[np.uint8],
        *,
        writable: bool = True,
        guard: Guard | None = None,
        layout: Mapping[str, Any] | None = None,
    ) -> RegisteredRegion:
        """Register a contiguous buffer of one byte or more. Raises `AccessRefused`, also for a guard: nobody would ask
        it when a peer comes."""
        self._check_open()
        if guard is not None:
            raise AccessRefused(f"{self.name} asks no guards")
        region = RegisteredRegion(self.address, buffer, writable, layout, self._detail)
        self._register(region)
        return self._regions.add(region)

    def withdraw(self, exposed: Exposed) -> None:
        """Take a region back, when own transfers have let go of it. What peers have begun, nobody knows: see
        docs/transfer-peers.md."""
        if isinstance(exposed, RegisteredRegion) and self._regions.knows(exposed):
            self._regions.withdraw(exposed)
            self._deregister(exposed)

    def _own(self, local: Exposed) -> RegisteredRegion:
        if not isinstance(local, RegisteredRegion) or not self._regions.knows(local):
            raise AccessRefused("the local region is not one of this endpoint's")
        return local

    def _check_remote(self, remote: RegionDescriptor, write: bool, notify: int | None) -> None:
        super()._check_remote(remote, write, notify)
        remote_base(remote)

    def _perform(self, batch: Batch[RegisteredRegion]) -> None:
        region, writing = batch.local, not batch.write
        if (problem := region.enter(batch.epoch, writing)) is not None:
            raise problem
        try:
            self._transfer(batch, region.buffer.ctypes.data + batch.spans.local, self._far(batch))
            if batch.checksums:
                self._sum(batch)
        finally:
            region.leave(writing)
        if (problem := region.problem(batch.epoch)) is not None:
            raise problem
        if time.monotonic() > batch.deadline:
            raise TransferTimeout("it arrived after its deadline")

    def _far(self, batch: Batch[RegisteredRegion]) -> NDArray[np.int64]:
        return remote_base(batch.remote) + batch.spans.remote

    def _sum(self, batch: Batch[RegisteredRegion]) -> None:
        """Of the bytes as they lie at the far end of the copy: what was written is read back."""
        buffer, starts, sizes = batch.local.buffer, batch.spans.local, batch.spans.nbytes
        if batch.write:
            scratch, starts = self.expose(np.empty(batch.spans.total_bytes, np.uint8)), np.cumsum(sizes) - sizes
            spans = Spans(starts, batch.spans.remote, sizes)
            back = Batch(False, scratch, batch.remote, spans, batch.indices, scratch.epoch, batch.deadline)
            try:
                self._transfer(back, scratch.base + starts, self._far(batch))
            finally:
                self.withdraw(scratch)
            buffer = scratch.buffer
        for index, start, size in zip(batch.indices.tolist(), starts.tolist(), sizes.tolist(), strict=True):
            batch.digests[index] = digest_of(buffer[start : start + size])

    def _end(self) -> None:
        self._shut_down()
        self._regions.withdraw_all()
