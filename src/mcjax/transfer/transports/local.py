"""Host memory to host memory inside one process: a copy by one worker thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from mcjax.transfer.base import Copy, CopyResult, Memory, Pacing
from mcjax.transfer.packing import STAGED_BYTES, gather, merged, pieces, scatter
from mcjax.transfer.transports.copying import copy_and_sum
from mcjax.transfer.transports.threaded import Batch, ThreadedTransport, checksum, convert
from mcjax.types import NullRecorder, Recorder

PACING = Pacing(slice_bytes=4 << 20, window_bytes=32 << 20)
"""A slice is about a millisecond of the thread's time, and the window what keeps it busy while the loop is not looking:
so long does a copy of a higher class wait at most."""

PACKED_BYTES = 1 << 10
"""Scattered blocks up to here are gathered, and scattered again, by indexed copies. Measured (GB/s of a thread's time,
packed and one by one): 0.71 and 0.36 at 256 bytes, 1.4 and 1.0 at 1 KiB, 1.8 and 1.8 at 2 KiB, 1.7 and 3.1 at 4 KiB."""


class Local(ThreadedTransport):
    """Moves blocks between any two memories of this process that have bytes on the host.

    The thread starts with the first batch. `close()` ends it, after the batches already submitted.
    """

    pacing = PACING

    def __init__(self, recorder: Recorder | None = None, name: str = "local"):
        super().__init__(name, recorder or NullRecorder())
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def reaches(self, source: Memory, target: Memory) -> bool:
        """Both are registered and have host bytes; the nodes may differ, since all are of this process."""
        return all(self.knows(memory) and memory.buffer() is not None for memory in (source, target))

    def close(self) -> None:
        """Finish what was submitted, then end the thread. Further batches raise `RuntimeError`."""
        self._closed = True
        if self._thread is not None:
            self._batches.put(None)
            self._thread.join()
            self._thread = None

    def _start(self, batch: Batch) -> None:
        if self._closed:
            raise RuntimeError(f"transport {self.name} is closed")
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"mcjax-{self.name}", daemon=True)
            self._thread.start()
        self._batches.put(batch)

    def _work(self) -> None:
        while (batch := self._batches.get()) is not None:
            for index in range(len(batch.copies)):
                self._perform(batch, index, _move)
            self._answer(batch)


def _move(copy: Copy) -> CopyResult:
    source, target = copy.source.memory, copy.target.memory
    read, written = source.buffer(), target.buffer()
    assert read is not None  # `reaches` said so when the batch came in
    assert written is not None
    if source.packer.name != target.packer.name:
        return _convert(copy, read, written)
    if not copy.checksum:
        if source.block_bytes <= PACKED_BYTES and read.flags.c_contiguous and written.flags.c_contiguous:
            _move_packed(copy, read.reshape(-1), written.reshape(-1))
            return CopyResult()
        for first, second, count in runs(copy.source.slots, copy.target.slots):
            written[second : second + count] = read[first : first + count]
        return CopyResult()
    checksums = [
        copy_and_sum(read[first], written[second])
        for first, second in zip(copy.source.slots, copy.target.slots, strict=True)
    ]
    return CopyResult(checksums=tuple(checksums))


def _move_packed(copy: Copy, read: NDArray[np.uint8], written: NDArray[np.uint8]) -> None:
    """Small blocks, which lie anywhere: whole stretches of them at a time, by way of a buffer that fits the cache."""
    block_bytes = copy.source.memory.block_bytes
    from_bytes = np.array(copy.source.slots, np.int64) * block_bytes
    to_bytes = np.array(copy.target.slots, np.int64) * block_bytes
    (from_bytes, to_bytes), nbytes = merged(
        from_bytes, to_bytes, nbytes=np.full(len(from_bytes), block_bytes, np.int64)
    )
    if not len(nbytes) or nbytes.sum() > PACKED_BYTES * len(nbytes):  # most follow one another
        for first, second, count in zip(from_bytes.tolist(), to_bytes.tolist(), nbytes.tolist(), strict=True):
            written[second : second + count] = read[first : first + count]
        return
    staging = np.empty(max(STAGED_BYTES, int(nbytes.max())), np.uint8)
    for part in pieces(nbytes):
        gather(read, from_bytes[part], nbytes[part], staging)
        scatter(staging, written, to_bytes[part], nbytes[part])


def runs(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """`(first source, first target, count)` of slots that follow one another on both sides."""
    start = 0
    for at in range(1, len(sources) + 1):
        steady = at - start
        if at == len(sources) or sources[at] != sources[start] + steady or targets[at] != targets[start] + steady:
            yield sources[start], targets[start], steady
            start = at


def _convert(copy: Copy, read: NDArray[np.uint8], written: NDArray[np.uint8]) -> CopyResult:
    source, target = copy.source.memory, copy.target.memory
    before: list[bytes] = []
    after: list[bytes] = []
    for first, second in zip(copy.source.slots, copy.target.slots, strict=True):
        written[second] = convert(read[first], source, target)
        if copy.checksum:
            before.append(checksum(read[first]))
            after.append(checksum(written[second]))
    return CopyResult(checksums=tuple(before), converted=tuple(after))
