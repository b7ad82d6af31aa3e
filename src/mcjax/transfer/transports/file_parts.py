"""What a copy between host memory and files is made of: runs of neighbouring slots, and what they pass through."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import BlockCorrupt, TransferError
from mcjax.transfer.base import Copy, Memory
from mcjax.transfer.transports.disk import PAGE_BYTES, Health
from mcjax.transfer.transports.threaded import Batch, checksum, convert

_IO_BYTES = 4 << 20
"""Neighbouring slots go by one call up to so many bytes; beyond that nothing is gained."""


@runtime_checkable
class FileMemory(Memory, Protocol):
    """A memory whose slots lie in files, each behind a header. `SsdStore` is one."""

    head_bytes: int
    slot_bytes: int

    @property
    def direct(self) -> bool:
        """Whether its descriptors want whole pages."""
        ...

    def place(self, slot: int) -> tuple[int, int]:
        """Descriptor and offset of a slot's header."""
        ...

    def staged_checksum(self, slot: int) -> bytes | None:
        """What a payload for `slot` must have as its checksum (empty: any); None where no block is expected there."""
        ...

    def head(self, slot: int, checksum: bytes) -> bytes | None:
        """The header to write in front of a payload of that checksum, `head_bytes` long."""
        ...

    def summed(self, slot: int) -> bool:
        """Whether a checksum was recorded for the block there, so that whoever reads it can compare."""
        ...

    def suspect(self, slot: int) -> None:
        """The disk could not write there. Thread-safe."""
        ...


@dataclass(slots=True, eq=False)
class Task:
    """A batch under way. `left`: copies that have not ended; `written`: files that must be synced."""

    batch: Batch
    left: int = 0
    written: dict[int, Health] = field(default_factory=dict[int, Health])


@dataclass(slots=True, eq=False)
class Job:
    """One copy under way, in `parts` that several threads move."""

    task: Task
    index: int
    copy: Copy
    memory: FileMemory
    host: NDArray[np.uint8]
    writes: bool
    bounce: bool
    converts: bool
    """Whether host memory and files differ in encoding."""
    checksums: list[bytes]
    """Of what was read, by position in the copy."""
    converted: list[bytes]
    """Of what was written, where that is something else."""
    health: Health
    failures: int
    """Of its device, when it was admitted."""
    parts: int = 0
    error: TransferError | None = None


@dataclass(slots=True, eq=False)
class Part:
    """Slots that lie one behind the other in one file: each with its place in the copy, on disk, and in memory."""

    job: Job
    file: int
    offset: int
    slots: list[tuple[int, int, int]]

    def end(self, slot_bytes: int) -> int:
        """The offset behind its last slot."""
        return self.offset + len(self.slots) * slot_bytes

    def each(self) -> Iterator[Part]:
        """Its slots, each by itself."""
        slot_bytes = self.job.memory.slot_bytes
        for number, slot in enumerate(self.slots):
            yield Part(self.job, self.file, self.offset + number * slot_bytes, [slot])


class Bounce:
    """One thread's aligned memory: for headers, and for payloads that the disk cannot be given where they lie."""

    def __init__(self) -> None:
        self._page = memoryview(mmap.mmap(-1, PAGE_BYTES))

    def room(self, nbytes: int) -> memoryview:
        """At least `nbytes`, aligned; what was there before may still be, or not."""
        if len(self._page) < nbytes:
            self._page = memoryview(mmap.mmap(-1, nbytes))
        return self._page


def file_side(copy: Copy) -> tuple[FileMemory, bool]:
    """The memory that lies in files, and whether the copy writes to it."""
    target = copy.target.memory
    if isinstance(target, FileMemory):
        return target, True
    assert isinstance(copy.source.memory, FileMemory)  # `reaches` said so
    return copy.source.memory, False


def job_of(task: Task, index: int, health: Health) -> Job:
    """The work that copy number `index` of the task's batch is."""
    copy = task.batch.copies[index]
    memory, writes = file_side(copy)
    host = (copy.source if writes else copy.target).memory.buffer()
    assert host is not None  # `reaches` said so
    fits = memory.block_bytes % PAGE_BYTES == 0
    if memory.direct:
        fits = fits and (host.ctypes.data | host.strides[0]) % PAGE_BYTES == 0
    count = len(copy.source.slots)
    converts = copy.source.memory.packer.name != copy.target.memory.packer.name
    sums = [b""] * count, [b""] * (count if converts else 0)
    return Job(task, index, copy, memory, host, writes, converts or not fits, converts, *sums, health, health.failures)


def parts_of(job: Job) -> Iterator[Part]:
    """The copy's slots in the order in which they lie in files, neighbours together."""
    memory, copy = job.memory, job.copy
    pairs = zip(copy.target.slots, copy.source.slots) if job.writes else zip(copy.source.slots, copy.target.slots)
    most = max(1, _IO_BYTES // memory.slot_bytes)
    part: Part | None = None
    for disk_slot, host_slot, position in sorted((*pair, position) for position, pair in enumerate(pairs)):
        file, offset = memory.place(disk_slot)
        if part is None or file != part.file or len(part.slots) == most or offset != part.end(memory.slot_bytes):
            if part is not None:
                yield part
            part = Part(job, file, offset, [])
        part.slots.append((position, disk_slot, host_slot))
    if part is not None:
        yield part


def to_write(part: Part, bounce: Bounce) -> list[memoryview]:
    """What goes to disk, headers and payloads in turn; raises `BlockCorrupt` for a payload other than announced."""
    job = part.job
    memory, copy = job.memory, job.copy
    head_bytes, block_bytes, slot_bytes = memory.head_bytes, memory.block_bytes, memory.slot_bytes
    room = bounce.room(len(part.slots) * (slot_bytes if job.bounce else head_bytes))
    views: list[memoryview] = []
    for number, (position, disk_slot, host_slot) in enumerate(part.slots):
        payload = job.host[host_slot]
        own = memoryview(payload)
        expected = memory.staged_checksum(disk_slot)
        if job.bounce:
            start = number * slot_bytes + head_bytes
            own = room[start : start + slot_bytes - head_bytes]
            own[:block_bytes] = convert(payload, copy.source.memory, memory).data
            own[block_bytes:] = bytes(len(own) - block_bytes)
        digest = written = checksum(np.frombuffer(own, np.uint8, block_bytes))
        if job.converts:
            digest = checksum(payload)
            job.converted[position] = written
        job.checksums[position] = digest
        head = None if expected is None else memory.head(disk_slot, written)
        if head is None:
            raise TransferError(f"nothing was staged for slot {disk_slot} of {memory.name}", copy.request_id)
        if expected and digest != expected:
            raise BlockCorrupt(
                f"block {position} of the copy to {memory.name} is not what was announced",
                copy.request_id,
                copy.first_block,
            )
        at = number * (slot_bytes if job.bounce else head_bytes)
        room[at : at + head_bytes] = head
        if job.bounce:
            views.append(room[at : at + slot_bytes])
        else:
            views += [room[at : at + head_bytes], own]
    return views


def to_read(part: Part, bounce: Bounce) -> list[memoryview]:
    """Where bytes from disk go, headers and payloads in turn."""
    job = part.job
    head_bytes, slot_bytes = job.memory.head_bytes, job.memory.slot_bytes
    if job.bounce:
        return [bounce.room(len(part.slots) * slot_bytes)[: len(part.slots) * slot_bytes]]
    head = bounce.room(head_bytes)[:head_bytes]
    return [view for _, _, host_slot in part.slots for view in (head, memoryview(job.host[host_slot]))]


def have_read(part: Part, bounce: Bounce) -> None:
    """Bring what was read to its place, converted if need be."""
    job = part.job
    head_bytes, slot_bytes, block_bytes = job.memory.head_bytes, job.memory.slot_bytes, job.memory.block_bytes
    for number, (position, _, host_slot) in enumerate(part.slots):
        if job.bounce:
            start = number * slot_bytes + head_bytes
            payload = np.frombuffer(bounce.room(0), np.uint8, block_bytes, start)
            if job.converts:
                job.checksums[position] = checksum(payload)
            job.host[host_slot] = convert(payload, job.memory, job.copy.target.memory)
        if job.converts:
            job.converted[position] = checksum(job.host[host_slot])
        elif job.copy.checksum:
            job.checksums[position] = checksum(job.host[host_slot])
