"""Opening, preallocating and reading the slab files of a folder."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from mcjax.errors import StoreError
from mcjax.kvpool.stores.ssd.header import HEADER_BYTES, BlockHeader, decode
from mcjax.kvpool.stores.ssd.manifest import ALIGNMENT_BYTES, Manifest, sync_folder

_logger = logging.getLogger("mcjax")

# Headers are far apart, so the kernel would fetch them one by one; told so many ahead, it keeps the disk's queue full.
_AHEAD = 256


class Slabs:
    """The open slab files of a manifest; `direct` where they are open for I/O past the page cache."""

    def __init__(self, folder: Path, manifest: Manifest, write: bool):
        """Opens every file. Raises `OSError`."""
        self.manifest = manifest
        self.direct = hasattr(os, "O_DIRECT")
        self._plain: list[int] = []
        self._files: list[int] = []
        try:
            for name, _ in manifest.slabs():
                self._open(folder / name, os.O_RDWR if write else os.O_RDONLY)
        except BaseException:
            self.close()
            raise
        if write and manifest.capacity and not self.direct and hasattr(os, "O_DIRECT"):
            _logger.warning("%s: its file system has no direct I/O, so blocks go through the page cache", folder)

    def _open(self, path: Path, flags: int) -> None:
        self._plain.append(os.open(path, flags))
        if self.direct:
            direct = _open_direct(path, flags)
            if direct is not None:
                self._files.append(direct)
                return
            self.direct = False
            for descriptor in self._files:
                os.close(descriptor)
            self._files.clear()

    def file(self, slab: int) -> int:
        """The descriptor that blocks of a slab are read and written by."""
        return self._files[slab] if self.direct else self._plain[slab]

    def place(self, slot: int) -> tuple[int, int]:
        """Descriptor and offset of a slot's header; the payload follows it."""
        slab, number = divmod(slot, self.manifest.slab_slots)
        return self.file(slab), number * self.manifest.slot_bytes

    def headers(self) -> Iterator[tuple[int, BlockHeader | None, str]]:
        """Of every slot, in order: its header, or what is wrong with it (nothing where none was ever written).

        Reads one sector a slot, by way of the page cache. Raises `OSError` where the disk fails but for a bad sector.
        """
        slots, size = self.manifest.slab_slots, self.manifest.slot_bytes
        for slab, descriptor in enumerate(self._plain):
            first = slab * slots
            count = min(slots, self.manifest.capacity - first)
            for number in range(count):
                if number % _AHEAD == 0:
                    _fetch(descriptor, [n * size for n in range(number, min(count, number + 2 * _AHEAD))])
                try:
                    sector = os.pread(descriptor, HEADER_BYTES, number * size)
                except OSError as problem:
                    if problem.errno != errno.EIO:
                        raise
                    yield first + number, None, "the header cannot be read: input/output error"
                    continue
                yield first + number, *decode(sector, first + number)

    def header(self, slot: int) -> tuple[BlockHeader | None, str]:
        """One slot's header as `headers` tells it."""
        slab, number = divmod(slot, self.manifest.slab_slots)
        return decode(os.pread(self._plain[slab], HEADER_BYTES, number * self.manifest.slot_bytes), slot)

    def close(self) -> None:
        for descriptor in (*self._plain, *self._files):
            os.close(descriptor)
        self._plain.clear()
        self._files.clear()


def _fetch(descriptor: int, offsets: list[int]) -> None:
    if hasattr(os, "posix_fadvise"):
        for offset in offsets:
            os.posix_fadvise(descriptor, offset, HEADER_BYTES, os.POSIX_FADV_WILLNEED)


def _open_direct(path: Path, flags: int) -> int | None:
    """`path` open for direct I/O; None where its file system has none, or wants more than pages aligned."""
    try:
        descriptor = os.open(path, flags | os.O_DIRECT)
    except OSError as problem:
        if problem.errno != errno.EINVAL:
            raise
        return None
    try:
        with mmap.mmap(-1, ALIGNMENT_BYTES) as page:
            os.preadv(descriptor, [page], 0)
    except OSError as problem:
        os.close(descriptor)
        if problem.errno != errno.EINVAL:
            raise
        return None
    return descriptor


def allocate(folder: Path, manifest: Manifest) -> None:
    """Give every slab of `manifest` its whole length on disk, and take away what lies beyond.

    Raises `StoreError` when the disk has not that much room; then everything is as it was.
    """
    wanted = dict(manifest.slabs())
    for path in sorted(folder.glob("slab-*")):
        if path.name not in wanted:
            path.unlink()
    grown: list[tuple[Path, int]] = []
    for name, nbytes in wanted.items():
        path = folder / name
        before = path.stat().st_size if path.exists() else 0
        if before == nbytes:
            continue
        grown.append((path, before))
        try:
            _resize(path, before, nbytes)
        except OSError as problem:
            _undo(grown)
            if problem.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise StoreError(
                f"{folder} has no room for {sum(wanted.values())} bytes of blocks ({problem.strerror}); free space "
                "there, or lower kvpool.ssd_bytes"
            ) from None
    sync_folder(folder)


def _resize(path: Path, before: int, after: int) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if after > before and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, before, after - before)
        else:
            os.ftruncate(descriptor, after)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _undo(grown: list[tuple[Path, int]]) -> None:
    for path, before in grown:
        with contextlib.suppress(OSError):
            if before:
                os.truncate(path, before)
            else:
                path.unlink()
