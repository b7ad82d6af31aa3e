"""Memory of another process of this host: mapped where it lies in a memory file, else read by `process_vm_readv`.

Only ever read: nobody writes into the memory of another process, so no late or stray write can land there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import AccessRefused, PeerLost, TransferError
from mcjax.transfer.transports.job import Pieces

IOV_MAX = 1024
"""Pieces that one system call takes."""

PTRACE_FIX = (
    "let processes of one user read one another (sysctl kernel.yama.ptrace_scope=0; in a container, the capability "
    "SYS_PTRACE and a common PID namespace), or keep what is shared in a memory file, as a pool's slab is"
)


def address_of(buffer: NDArray[Any]) -> int:
    return buffer.__array_interface__["data"][0]


def memory_file(buffer: NDArray[np.uint8]) -> tuple[int, int] | None:
    """`(descriptor, offset)` of the memory file that a buffer lies in, the descriptor a new one for reading only; None
    if it lies in none, or in one that could be cut short (whoever maps that may be killed by it)."""
    found = _mapping_of(address_of(buffer), len(buffer))
    if found is None:
        return None
    device, inode, offset = found
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            about = os.stat(f"/proc/self/fd/{name}")
            if about.st_ino != inode or (os.major(about.st_dev), os.minor(about.st_dev)) != device:
                continue
            fd = os.open(f"/proc/self/fd/{name}", os.O_RDONLY | os.O_CLOEXEC)
            if sealed(fd):
                return fd, offset
            os.close(fd)
    return None


def _mapping_of(address: int, nbytes: int) -> tuple[tuple[int, int], int, int] | None:
    """`((major, minor), inode, offset in the file)` of a shared memory file that is mapped at an address: the kernel
    may show one mapping as several that follow one another."""
    first: tuple[tuple[int, int], int, int] | None = None
    reached = address
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, offset, device, inode, *path = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in span.split("-"))
        if not start <= reached < end:
            continue
        if rights[3] != "s" or not path or not path[0].startswith("/memfd:"):
            return None
        major, minor = (int(part, 16) for part in device.split(":"))
        at = int(offset, 16) + reached - start
        first = first or ((major, minor), int(inode), at)
        if first != ((major, minor), int(inode), at - (reached - address)):
            return None
        reached = end
        if reached >= address + nbytes:
            return first
    return None


def sealed(fd: int) -> bool:
    """Whether a memory file can never become shorter."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


class Mappings:
    """Memory files of one peer, each mapped once, for reading, and for as long as anybody looks at it."""

    def __init__(self) -> None:
        self._by_file: WeakValueDictionary[tuple[int, int], NDArray[np.uint8]] = WeakValueDictionary()

    def attach(self, fd: int, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """`[nbytes]`, read-only. Raises `AccessRefused` for a descriptor that is not a memory file of that size which
        stays so."""
        about = os.fstat(fd)
        lasting = stat.S_ISREG(about.st_mode) and sealed(fd)
        if not lasting or not 0 <= offset <= about.st_size - nbytes:
            raise AccessRefused("the peer sent no memory file that is safe to map")
        file = about.st_dev, about.st_ino
        whole = self._by_file.get(file)
        if whole is None:
            whole = self._by_file[file] = map_for_reading(fd, about.st_size)
        return whole[offset : offset + nbytes]


def map_for_reading(fd: int, nbytes: int) -> NDArray[np.uint8]:
    try:
        return np.frombuffer(mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
    except (OSError, ValueError) as problem:
        raise AccessRefused(f"the peer's memory cannot be mapped: {problem}") from None


class ForeignMemory:
    """Reads the memory of one process by its addresses."""

    def __init__(self, pid: int):
        self.pid = pid
        self._vector = ctypes.c_ulong * 2
        """`iovec`: address, length."""
        self._readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self._readv.restype = ctypes.c_ssize_t
        size = ctypes.c_ulong
        self._readv.argtypes = [ctypes.c_int, ctypes.c_void_p, size, ctypes.c_void_p, size, size]

    def peek(self, address: int, nbytes: int) -> bytes:
        """Raises `TransferError`."""
        into = np.zeros(nbytes, np.uint8)
        self.fetch_one(into, address, 0, 0, nbytes)
        return into.tobytes()

    def fetch_one(self, into: NDArray[np.uint8], base: int, target: int, source: int, nbytes: int) -> None:
        """As `fetch`, one piece."""
        here = self._vector(address_of(into) + target, nbytes)
        there = self._vector(base + source, nbytes)
        self._read(ctypes.addressof(here), ctypes.addressof(there), 1, nbytes)

    def fetch(self, into: NDArray[np.uint8], base: int, pieces: Pieces) -> None:
        """Copy pieces of what lies at the address `base` there. Raises `TransferError` unless all of them came."""
        vectors = np.empty((2, len(pieces), 2), np.uint64)
        vectors[0, :, 0] = pieces.target
        vectors[0, :, 0] += np.uint64(address_of(into))
        vectors[1, :, 0] = pieces.source
        vectors[1, :, 0] += np.uint64(base)
        vectors[:, :, 1] = pieces.nbytes
        here, there, step = address_of(vectors[0]), address_of(vectors[1]), vectors.itemsize * 2
        for start in range(0, len(pieces), IOV_MAX):
            count = min(IOV_MAX, len(pieces) - start)
            at = start * step
            self._read(here + at, there + at, count, int(pieces.nbytes[start : start + count].sum()))

    def _read(self, here: int, there: int, count: int, wanted: int) -> None:
        got = self._readv(self.pid, here, count, there, count, 0)
        if got != wanted:
            raise _problem(ctypes.get_errno() if got < 0 else errno.EFAULT, got, wanted)


def _problem(number: int, got: int, wanted: int) -> TransferError:
    if number == errno.ESRCH:
        return PeerLost("the process is gone")
    if number == errno.EPERM:
        return AccessRefused(f"this process may not read the peer's memory; {PTRACE_FIX}")
    if number == errno.EFAULT:
        return TransferError(f"the peer's memory is not all there ({max(got, 0)} of {wanted} bytes came)")
    return TransferError(f"process_vm_readv: {os.strerror(number)}")
