"""One piece of host memory for all blocks of a node: shared, pre-faulted, page aligned, and never allocated from again.

On Linux it is a memory file (`memfd_create`): another process of the host that may look at this one maps the same pages
by the slab's descriptor, and a network card registers them by address and length. Elsewhere it is an anonymous shared
mapping, which only children of the process see.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import ConfigError
from mcjax.kvpool.stores.paging import (
    HUGE_PAGE_BYTES,
    ORDINARY,
    PAGE_BYTES,
    bind,
    free_huge_pages,
    known_node,
    pages_got,
    touch,
)

LOG = logging.getLogger(__name__)

HugePages = Literal["auto", "never", "require"]

LINE_BYTES = 64
"""Slots smaller than a page begin at a multiple of a cache line, which is also what XLA:CPU asks of a buffer that it
reads in place."""


@dataclass(frozen=True, slots=True)
class Area:
    """Slots of one size class inside a slab. Whoever knows it and the slab's descriptor sees the same blocks."""

    offset: int
    capacity: int
    block_bytes: int

    @property
    def stride_bytes(self) -> int:
        return stride_bytes(self.block_bytes)

    @property
    def nbytes(self) -> int:
        return area_bytes(self.capacity, self.block_bytes)


def stride_bytes(block_bytes: int) -> int:
    """From the start of one slot to that of the next: whole pages, or cache lines for blocks smaller than a page."""
    unit = PAGE_BYTES if block_bytes >= PAGE_BYTES else LINE_BYTES
    return -(-block_bytes // unit) * unit


def area_bytes(capacity: int, block_bytes: int) -> int:
    """What `capacity` slots take of a slab: whole pages."""
    return -(-capacity * stride_bytes(block_bytes) // PAGE_BYTES) * PAGE_BYTES


def rows(memory: mmap.mmap, area: Area) -> NDArray[np.uint8]:
    """`[capacity, block_bytes]`, a view; rows are contiguous, and aligned as `stride_bytes` says."""
    stride = area.stride_bytes
    flat = np.frombuffer(memory, np.uint8, area.capacity * stride, area.offset)
    return flat.reshape(area.capacity, stride)[:, : area.block_bytes]


class Slab:
    """`nbytes` of host memory, every page of it there.

    Args:
        nbytes: rounded up to whole pages.
        huge_pages: `auto`: reserved huge pages (`vm.nr_hugepages`) if enough are free, else transparent ones if the
            system gives them, else ordinary ones; `never`: ordinary ones; `require`: huge ones or a `ConfigError`.
        numa_node: where the memory lies; None leaves that to the system.
        name: what the system lists it as.

    Raises `ConfigError` when the machine has not so much memory, no such NUMA node, or not the pages required.
    """

    def __init__(
        self, nbytes: int, huge_pages: HugePages = "auto", numa_node: int | None = None, name: str = "mcjax-blocks"
    ):
        large = huge_pages == "require" or (huge_pages == "auto" and nbytes >= HUGE_PAGE_BYTES)
        unit = HUGE_PAGE_BYTES if large else PAGE_BYTES
        self.nbytes = max(1, -(-nbytes // unit)) * unit
        self.numa_node = known_node(numa_node)
        """Where the memory is bound to; None where it is not, or the system knows of no nodes."""
        _check_available(self.nbytes)
        self._used = 0
        try:
            self.fd, memory, reserved = _mapping(self.nbytes, large, name)
        except (OSError, OverflowError, ValueError, MemoryError) as problem:
            raise _too_much(self.nbytes, str(problem)) from None
        self._map: mmap.mmap | None = memory
        self._close_fd = weakref.finalize(self, os.close, self.fd) if self.fd >= 0 else None
        self.address = np.frombuffer(memory, np.uint8).ctypes.data
        """Of its first byte in this process; `address, nbytes` is what RDMA registers."""
        if self.numa_node is not None:
            bind(self.address, self.nbytes, self.numa_node)
        if large and not reserved and hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        touch(memory, self.address, self.nbytes)
        self.pages = "reserved huge pages" if reserved else pages_got(self.address) if large else ORDINARY
        """What kind of pages it got."""
        if huge_pages == "require" and self.pages == ORDINARY:
            self.close()
            problem = f"the system gives {self.nbytes} shared bytes in ordinary pages only"
            fix = "reserve some (sysctl vm.nr_hugepages) or allow them for shared memory (transparent_hugepage)"
            raise ConfigError("kvpool.huge_pages", "require", f"{problem}; {fix}", ["auto", "never"])
        LOG.info("%d MiB of host memory in %s, NUMA node %s", self.nbytes >> 20, self.pages, self.numa_node)

    @property
    def path(self) -> str:
        """Where another process of this host opens it. Raises `ConfigError` where there is no such place."""
        if self.fd < 0:
            raise ConfigError("slab", sys.platform, "only Linux lets other processes map a slab")
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def carve(self, capacity: int, block_bytes: int) -> Area:
        """The next size class. Raises `ValueError` if less is left than that takes."""
        area = Area(self._used, capacity, block_bytes)
        if area.offset + area.nbytes > self.nbytes:
            raise ValueError(f"{area.nbytes} bytes wanted of a slab that has {self.nbytes - self._used} left")
        self._used += area.nbytes
        return area

    def blocks(self, area: Area) -> NDArray[np.uint8]:
        """`[capacity, block_bytes]`, as `rows` says. Keeps the memory mapped for as long as it is referred to."""
        if self._map is None:
            raise ValueError("the slab is closed")
        return rows(self._map, area)

    def flat(self, area: Area) -> NDArray[np.uint8]:
        """`[capacity * stride_bytes]`: the area as one piece, padding between slots included."""
        if self._map is None:
            raise ValueError("the slab is closed")
        return np.frombuffer(self._map, np.uint8, area.capacity * area.stride_bytes, area.offset)

    def close(self) -> None:
        """Give everything back, as soon as nobody has a view of it any more. Other processes keep what they
        have mapped. May be called twice."""
        self.fd, self._map = -1, None
        if self._close_fd is not None:
            self._close_fd()


class Attached:
    """A slab of another process of this host, mapped by descriptor or by `Slab.path`."""

    def __init__(self, where: str | int, nbytes: int):
        """`where` is the path that the owner told, or a descriptor that it sent. Raises `OSError` if it has gone."""
        if isinstance(where, str):
            fd = os.open(where, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._map = mmap.mmap(fd, nbytes)
            finally:
                os.close(fd)
        else:
            self._map = mmap.mmap(where, nbytes)

    def blocks(self, area: Area) -> NDArray[np.uint8]:
        """The very blocks that the owner sees."""
        return rows(self._map, area)


def _mapping(nbytes: int, large: bool, name: str) -> tuple[int, mmap.mmap, bool]:
    """`(descriptor, mapping, in reserved huge pages)`; the descriptor is -1 where there are no memory files."""
    if not hasattr(os, "memfd_create"):
        return -1, mmap.mmap(-1, nbytes), False
    if large and free_huge_pages() * HUGE_PAGE_BYTES >= nbytes:
        try:
            return *_file(nbytes, name, os.MFD_HUGETLB), True
        except OSError as problem:  # somebody else was quicker
            LOG.info("no reserved huge pages: %s", problem)
    return *_file(nbytes, name, 0), False


def _file(nbytes: int, name: str, flags: int) -> tuple[int, mmap.mmap]:
    import fcntl

    fd = os.memfd_create(name, flags | os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        memory = mmap.mmap(fd, nbytes)
        # Nobody who has the descriptor can cut it short: a mapping beyond the end of its file is a fatal signal.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd, memory


def _check_available(nbytes: int) -> None:
    """A memory file larger than the machine is granted, and kills the process when it is touched: ask first."""
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return
    if found and nbytes > int(found[1]) << 10:
        raise _too_much(nbytes, f"{int(found[1]) >> 10} MiB are available")


def _too_much(nbytes: int, why: str) -> ConfigError:
    return ConfigError("pool_blocks", f"{nbytes} bytes", f"so much host memory is not to be had ({why})")
