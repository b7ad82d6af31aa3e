"""Regions of this process's memory as an endpoint knows them, and who is at work on them."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import AccessRefused, StaleRegion, TransferError
from mcjax.transfer.transports.endpoint import Guard, RegionDescriptor


def check_exposable(buffer: NDArray[np.uint8], writable: bool) -> None:
    """Raises `AccessRefused` for a buffer that is not one piece of bytes, or is read-only and shown as writable."""
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous or not len(buffer):
        raise AccessRefused("only a contiguous buffer of at least one byte can be exposed: `[nbytes]` uint8")
    if writable and not buffer.flags.writeable:
        raise AccessRefused("a read-only buffer can only be exposed as one that is not writable")


class Region:
    """One exposed buffer. Every copy enters it, piece by piece, so that it can be waited for.

    `writers` and `readers` count the pieces that are being copied into and out of it right now.
    """

    def __init__(
        self,
        address: str,
        buffer: NDArray[np.uint8],
        writable: bool = True,
        guard: Guard | None = None,
        layout: Mapping[str, Any] | None = None,
    ):
        """Raises `AccessRefused`, as `check_exposable`."""
        check_exposable(buffer, writable)
        self.key = secrets.randbits(64)
        self.buffer = buffer
        self.nbytes = len(buffer)
        self.address = address
        self.writable = writable
        self.guard = guard
        self.layout = dict(layout or {})
        self.epoch = 0
        self.withdrawn = False
        self._writers = 0
        self._readers = 0
        self._changed = threading.Condition()

    def descriptor(self) -> RegionDescriptor:
        return RegionDescriptor(
            self.address, self.key, self.nbytes, self.epoch, self.writable, self.detail(), self.layout
        )

    def detail(self) -> dict[str, Any]:
        """What one kind of endpoint adds to the descriptor."""
        return {}

    def advance(self) -> None:
        """Descriptors given out before are stale. When this returns, nothing that was sent to them lands any more."""
        with self._changed:
            self.epoch += 1
            self._publish()
            self._changed.wait_for(lambda: not self._writers)

    def retire(self) -> None:
        """Nothing enters any more; returns when all that had entered has left."""
        with self._changed:
            self.withdrawn = True
            self._publish()
            self._changed.wait_for(lambda: not self._writers and not self._readers)

    def _publish(self) -> None:
        """Tell whoever looks from outside of the process, before anybody is waited for."""

    def problem(self, epoch: int) -> TransferError | None:
        """Why a copy that was told of `epoch` must not be, or must not be believed. Where there is a guard, that one
        knows which later epoch still goes for which bytes."""
        if self.withdrawn:
            return AccessRefused("the region was withdrawn")
        if epoch < self.epoch or (epoch > self.epoch and self.guard is None):
            return StaleRegion(f"the region is in epoch {self.epoch}, the descriptor is of epoch {epoch}")
        return None

    def enter(self, epoch: int, writing: bool) -> TransferError | None:
        """Begin a piece, unless there is a problem: then it must not be copied, and `leave` not be called."""
        with self._changed:
            problem = self.problem(epoch)
            if problem is None and writing:
                self._writers += 1
            elif problem is None:
                self._readers += 1
            return problem

    def leave(self, writing: bool) -> None:
        with self._changed:
            if writing:
                self._writers -= 1
            else:
                self._readers -= 1
            if not self._writers:
                self._changed.notify_all()


R = TypeVar("R", bound="Region")


class Regions(Generic[R]):
    """The regions that an endpoint knows, by key."""

    def __init__(self) -> None:
        self._by_key: dict[int, R] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, region: R) -> R:
        with self._lock:
            self._by_key[region.key] = region
        return region

    def find(self, key: int) -> R:
        """Raises `AccessRefused` for a key that is none, or no more."""
        region = self._by_key.get(key)
        if region is None:
            raise AccessRefused("no region has that key")
        return region

    def knows(self, region: object) -> bool:
        key = getattr(region, "key", None)
        return isinstance(key, int) and self._by_key.get(key) is region

    def withdraw(self, region: R) -> None:
        """Forget it and wait until nothing touches it. Nothing happens if it is not known."""
        with self._lock:
            if self._by_key.get(region.key) is not region:
                return
            del self._by_key[region.key]
        region.retire()

    def withdraw_all(self) -> None:
        for region in list(self._by_key.values()):
            self.withdraw(region)
