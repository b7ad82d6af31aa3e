"""In which epoch each region is: a page that its owner writes and its peers look at, without asking.

A line a region: `incarnation, epoch`, 64 bits each. Whoever copies looks before and after: as the owner changes the
line before it changes the bytes, what was copied between two equal looks is of that epoch. Incarnations are counted and
never used twice; 0 is nobody's.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading

import numpy as np

from mcjax.errors import AccessRefused
from mcjax.transfer.transports.shm.memory import map_for_reading, sealed

REGIONS = 1 << 16
"""That one endpoint may show at a time. The file takes memory for what is used of it only."""

NBYTES = REGIONS * 16


class StateFile:
    """The owner's side."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("mcjax-regions", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, NBYTES)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._lines = np.frombuffer(mmap.mmap(self.fd, NBYTES), np.uint64).reshape(REGIONS, 2)
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._used = 0
        self._incarnations = 0

    def take(self) -> tuple[int, int]:
        """`(line, incarnation)` of a new region, in epoch 0. Raises `AccessRefused` when all are taken."""
        with self._lock:
            if not self._free and self._used == REGIONS:
                raise AccessRefused(f"{REGIONS} regions are exposed already")
            line = self._free.pop() if self._free else self._used
            self._used = max(self._used, line + 1)
            self._incarnations += 1
            self._lines[line] = 0
            self._lines[line, 0] = self._incarnations
            return line, self._incarnations

    def set(self, line: int, epoch: int) -> None:
        self._lines[line, 1] = epoch

    def give_back(self, line: int) -> None:
        """From now on, whoever looks finds that the region is gone."""
        self._lines[line, 0] = 0
        with self._lock:
            self._free.append(line)

    def for_reading(self) -> int:
        """A descriptor to be sent and closed."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """When no region is left. Peers keep what they have mapped."""
        os.close(self.fd)
        self._lines = np.zeros((0, 2), np.uint64)


class StateView:
    """A peer's side."""

    def __init__(self, fd: int):
        """Raises `AccessRefused` for what cannot be such a file."""
        if os.fstat(fd).st_size != NBYTES or not sealed(fd):
            raise AccessRefused("the peer sent something else than the state of its regions")
        self._lines = map_for_reading(fd, NBYTES).view(np.uint64).reshape(REGIONS, 2)

    def epoch(self, line: int, incarnation: int) -> int:
        """-1 once the region was withdrawn."""
        now, epoch = self._lines[line].tolist()
        return epoch if now == incarnation else -1
