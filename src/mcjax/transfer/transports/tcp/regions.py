"""Regions of this process's memory that are shown to peers, and who is at work on them."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mcjax.transfer.transports.endpoint import Exposed, Guard, RegionDescriptor
from mcjax.transfer.transports.regions import check_exposable
from mcjax.transfer.transports.tcp.frames import Status

LOG = logging.getLogger(__name__)

GRACE_S = 1.0
"""How long whoever touches a region may take to leave it by himself. A group of spans takes a millisecond; what is
still there after this waits for a peer, and is disconnected from it."""


class User(Protocol):
    """Somebody who touches a region's bytes, and may be stuck doing so."""

    def interrupt(self) -> None: ...


class Region:
    """One exposed buffer. `view`: its bytes, entered group by group (`enter`, `leave`) by whoever touches them."""

    def __init__(
        self,
        address: str,
        buffer: NDArray[np.uint8],
        writable: bool = True,
        guard: Guard | None = None,
        layout: Mapping[str, Any] | None = None,
    ):
        """Raises `AccessRefused`, as `regions.check_exposable`."""
        check_exposable(buffer, writable)
        self.key = secrets.randbits(64)
        self.nbytes = len(buffer)
        self.buffer = buffer
        self.view = memoryview(buffer)  # pyright: ignore[reportArgumentType]
        self.writable = writable
        self.guard = guard
        self.epoch = 0
        self.withdrawn = False
        self._address = address
        self._layout = dict(layout or {})
        self._users: dict[User, tuple[int, bool]] = {}
        """Who has entered: as which visit, and whether to write."""
        self._visits = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waited_for = 0
        """How many wait for users to leave."""

    def descriptor(self) -> RegionDescriptor:
        return RegionDescriptor(
            self._address, self.key, self.nbytes, self.epoch, self.writable, layout=dict(self._layout)
        )

    def advance(self) -> None:
        """Descriptors given out before are stale. When this returns, nothing that was sent to them lands any more."""
        with self._lock:
            self.epoch += 1
        self._wait_for_users(writers_only=True)

    def retire(self) -> None:
        """Nobody enters any more; returns when all that had entered have left."""
        with self._lock:
            self.withdrawn = True
        self._wait_for_users(writers_only=False)

    def enter(self, user: User, epoch: int, writing: bool) -> Status:
        """Begin to touch the bytes, if that is `OK`; `leave` has to follow then."""
        with self._lock:
            status = self.status(epoch)
            if status is Status.OK:
                self._visits += 1
                self._users[user] = self._visits, writing
            return status

    def leave(self, user: User) -> None:
        with self._lock:
            del self._users[user]
            if self._waited_for:
                self._changed.notify_all()

    def status(self, epoch: int) -> Status:
        """Whether what is told of `epoch` still goes for the region as a whole. Where there is a guard, that one knows
        which later epoch goes for which bytes."""
        if self.withdrawn:
            return Status.WITHDRAWN
        if epoch < self.epoch or (epoch > self.epoch and self.guard is None):
            return Status.STALE
        return Status.OK

    def judge(self, epoch: int, offsets: NDArray[np.int64], nbytes: NDArray[np.int64], writing: bool) -> bytes:
        """The status of each span `[n]` as of now. Lengths are at least 1; nothing overflows, whatever they say."""
        whole = self.status(epoch)
        if whole is Status.OK and writing and not self.writable:
            whole = Status.READ_ONLY
        if len(nbytes) == 1:  # NumPy would take several times as long
            inside = 0 <= int(offsets[0]) <= self.nbytes - int(nbytes[0])
            statuses = bytes([whole if inside else Status.OUTSIDE])
        else:
            table = np.full(len(nbytes), whole, np.uint8)
            table[(offsets < 0) | (offsets > self.nbytes - nbytes)] = Status.OUTSIDE
            statuses = table.tobytes()
        return self._ask_guard(epoch, offsets, nbytes, statuses) if whole is Status.OK else statuses

    def judge_again(self, epoch: int, offsets: NDArray[np.int64], nbytes: NDArray[np.int64], before: bytes) -> bytes:
        """The statuses after the copy: what was not OK stays as it was, what was may have become stale."""
        whole = self.status(epoch)
        if whole is Status.OK:
            return self._ask_guard(epoch, offsets, nbytes, before)
        return bytes(status or whole for status in before)

    def _ask_guard(self, epoch: int, offsets: NDArray[np.int64], nbytes: NDArray[np.int64], statuses: bytes) -> bytes:
        """Of each span that is OK so far."""
        if self.guard is None:
            return statuses
        answers = bytearray(statuses)
        for index, (offset, length) in enumerate(zip(offsets.tolist(), nbytes.tolist(), strict=True)):
            if answers[index] != Status.OK:
                continue
            try:
                if not self.guard(offset, length, epoch):
                    answers[index] = Status.STALE
            except Exception:  # it is not known to be current: that must be told, and end nobody's thread
                LOG.exception("a region's guard raised")
                answers[index] = Status.FAILED
        return bytes(answers)

    def _wait_for_users(self, writers_only: bool) -> None:
        """For those who are there now; whoever enters from now on knows of the change."""
        with self._lock:
            newest = self._visits

            def stuck() -> list[User]:
                visits = self._users.items()
                return [user for user, (visit, writes) in visits if visit <= newest and (writes or not writers_only)]

            self._waited_for += 1
            try:
                if self._changed.wait_for(lambda: not stuck(), GRACE_S):
                    return
                users = stuck()
            finally:
                self._waited_for -= 1
        # Without the lock: users have locks of their own, and enter with them held.
        for user in users:
            user.interrupt()
        with self._lock:
            self._waited_for += 1
            self._changed.wait_for(lambda: not stuck())
            self._waited_for -= 1


class Regions:
    """The regions that an endpoint shows, by key."""

    def __init__(self) -> None:
        self._by_key: dict[int, Region] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, region: Region) -> Region:
        with self._lock:
            self._by_key[region.key] = region
        return region

    def find(self, key: int) -> Region | None:
        return self._by_key.get(key)

    def knows(self, exposed: Exposed) -> bool:
        return self._by_key.get(exposed.key) is exposed

    def withdraw(self, region: Region) -> None:
        """Forget it, and wait until nothing touches it. Nothing happens if it is not known."""
        with self._lock:
            if self._by_key.get(region.key) is not region:
                return
            del self._by_key[region.key]
        region.retire()

    def withdraw_all(self) -> None:
        for region in list(self._by_key.values()):
            self.withdraw(region)
