"""Host memory to host memory inside one process: a copy by one worker thread."""

from __future__ import annotations

import queue
import threading

from mcjax.transfer.base import Copy, Memory
from mcjax.transfer.transports.threaded import Batch, ThreadedTransport, checksum
from mcjax.types import NullRecorder, Recorder


class Local(ThreadedTransport):
    """Moves blocks between any two memories of this process that have bytes on the host.

    The thread starts with the first batch. `close()` ends it, after the batches already submitted.
    """

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


def _move(copy: Copy) -> tuple[bytes, ...]:
    source, target = copy.source.memory.buffer(), copy.target.memory.buffer()
    assert source is not None  # `reaches` said so when the batch came in
    assert target is not None
    checksums: list[bytes] = []
    for read, written in zip(copy.source.slots, copy.target.slots, strict=True):
        target[written] = source[read]
        if copy.checksum:
            # Of the bytes that were read, hence of the copy: the source may change hands meanwhile.
            checksums.append(checksum(target[written]))
    return tuple(checksums)
