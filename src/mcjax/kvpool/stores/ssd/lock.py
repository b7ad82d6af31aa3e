"""One process at a time writes to a folder; a lock that ends with its process says which."""

from __future__ import annotations

import fcntl
import os
import platform
from pathlib import Path

from mcjax.errors import StoreError

LOCK_NAME = "lock"

_GLANCES = 1000
"""How often a reader may be found looking before the lock counts as taken."""


class FolderLock:
    """Held from its making until `close`, or until the process is gone however it ended."""

    def __init__(self, folder: Path):
        """Raises `StoreError` that names who holds it."""
        self._file = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        if not _take(self._file):
            who = _name(self._file)
            os.close(self._file)
            raise StoreError(
                f"{folder} is in use by {who}; end that run, or name another folder (kvpool.ssd_path). "
                "`mcjax pool inspect` may look into it meanwhile"
            )
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()} on {platform.node()}".encode(), 0)

    def close(self) -> None:
        os.close(self._file)


def _take(descriptor: int) -> bool:
    """Take the lock alone, unless somebody else has it alone: readers, who share it for an instant, are no obstacle."""
    for _ in range(_GLANCES):
        if _flock(descriptor, fcntl.LOCK_EX):
            return True
        if not _flock(descriptor, fcntl.LOCK_SH):
            return False
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        if hasattr(os, "sched_yield"):
            os.sched_yield()
    return False


def _flock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holder(folder: Path) -> str:
    """Who holds the folder's lock; nothing if nobody does."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY)
    except FileNotFoundError:
        return ""
    try:
        # Shared, and given back at once: a reader must not keep a run from starting.
        return "" if _flock(descriptor, fcntl.LOCK_SH) else _name(descriptor)
    finally:
        os.close(descriptor)


def _name(descriptor: int) -> str:
    return os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
