"""Registered memory: what the card may touch for us (`lkey`), and what it may touch for peers (`rkey`).

Two registrations, for they end at different times. A peer's ends when the region is withdrawn *or changes hands*, so
that the card itself refuses whoever comes with an older key; ours lives on under it. Neither copies, both pin pages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import AccessRefused, StaleRegion
from mcjax.transfer.transports.endpoint import Guard, RegionDescriptor
from mcjax.transfer.transports.rdma.library import Verbs


@dataclass(slots=True)
class _Cached:
    registration: Any
    users: int = 0


class Registrations:
    """Registrations of one protection domain. Those for own use are shared by all regions over the same bytes, and end
    with the last of them. Thread-safe."""

    def __init__(self, verbs: Verbs, domain: Any):
        self._verbs = verbs
        self._domain = domain
        self._lock = threading.Lock()
        self._own: dict[tuple[int, int, bool], _Cached] = {}

    def __len__(self) -> int:
        return len(self._own)

    def take(self, buffer: NDArray[np.uint8]) -> Any:
        """For own transfers from and to the buffer. Raises `AccessRefused` for memory that cannot be registered."""
        key = _range(buffer)
        with self._lock:
            cached = self._own.get(key)
            if cached is None:
                access = self._verbs.enums.IBV_ACCESS_LOCAL_WRITE if buffer.flags.writeable else 0
                cached = self._own[key] = _Cached(self._register(buffer, access))
            cached.users += 1
            return cached.registration

    def give_back(self, buffer: NDArray[np.uint8]) -> None:
        key = _range(buffer)
        with self._lock:
            cached = self._own[key]
            cached.users -= 1
            if not cached.users:
                del self._own[key]
                cached.registration.close()

    def show(self, buffer: NDArray[np.uint8], writable: bool) -> Any:
        """A registration of its own, with a key for peers."""
        enums = self._verbs.enums
        access = enums.IBV_ACCESS_REMOTE_READ
        if writable:
            # Verbs: who lets others write must be allowed to write.
            access = access | enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
        return self._register(buffer, access)

    def _register(self, buffer: NDArray[np.uint8], access: int) -> Any:
        try:
            return self._verbs.mr.MR(self._domain, buffer.nbytes, int(access), address=buffer.ctypes.data)
        except self._verbs.error as problem:
            raise AccessRefused(
                f"{buffer.nbytes} bytes of memory cannot be registered ({problem}); `ulimit -l` bounds how "
                "much may be pinned"
            ) from None


def _range(buffer: NDArray[np.uint8]) -> tuple[int, int, bool]:
    return buffer.ctypes.data, buffer.nbytes, buffer.flags.writeable


class Region:
    """A region of this process's memory (`endpoint.Exposed`). Thread-safe."""

    def __init__(
        self,
        key: int,
        buffer: NDArray[np.uint8],
        registrations: Registrations,
        descriptor: Callable[[Region], RegionDescriptor],
        changed: Callable[[Region], None],
        writable: bool,
        guard: Guard | None,
        layout: Mapping[str, Any],
    ):
        self.key = key
        self.buffer = buffer
        self.nbytes = buffer.nbytes
        self.epoch = 0
        self.writable = writable
        self.guard = guard
        self.layout = layout
        self.withdrawn = False
        self.local_key: int = registrations.take(buffer).lkey
        self._registrations = registrations
        self._descriptor = descriptor
        self._changed = changed
        self._shown: Any = None
        self._lock = threading.Lock()

    @property
    def address(self) -> int:
        return self.buffer.ctypes.data

    def descriptor(self) -> RegionDescriptor:
        return self._descriptor(self)

    def advance(self) -> None:
        """Descriptors given out before are stale, and the card refuses whoever still comes with the key they led to."""
        with self._lock:
            self.epoch += 1
            self._hide()
        self._changed(self)

    def remote_key(self, epoch: int) -> int:
        """What a peer's card needs to touch the region, if what it was told of `epoch` still goes. The first peer to
        ask has the region registered. Raises `AccessRefused`, `StaleRegion`."""
        with self._lock:
            self.judge(epoch)
            if self._shown is None:
                self._shown = self._registrations.show(self.buffer, self.writable)
            return self._shown.rkey

    def judge(self, epoch: int) -> None:
        """Raises `AccessRefused` or `StaleRegion` if what was told of `epoch` goes no more. Where there is a guard,
        that one knows which later epoch still goes for which bytes."""
        if self.withdrawn:
            raise AccessRefused("the region was withdrawn")
        if epoch < self.epoch or (epoch > self.epoch and self.guard is None):
            raise StaleRegion(f"the region is in epoch {self.epoch}, the descriptor is of epoch {epoch}")

    def close(self) -> None:
        """Nothing may touch the buffer any more, neither for us nor for peers."""
        with self._lock:
            self.withdrawn = True
            self._hide()
        self._registrations.give_back(self.buffer)

    def _hide(self) -> None:
        if self._shown is not None:
            self._shown.close()
            self._shown = None
