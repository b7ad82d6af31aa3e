"""Moves blocks from one instance's pages to another's, mesh to mesh, without the host in between.

Gathered on the thread of the executor that owns the source, scattered on that of the target's: each thread touches its
own pages only, and hands on instead of waiting, so two that send to each other cannot block each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Array

from mcjax.backends.jax.device_store import DevicePages
from mcjax.backends.jax.executor import JaxExecutor
from mcjax.errors import InstanceDown, LayoutMismatch, StaleRegion, TransferError
from mcjax.transfer.base import Copy, CopyResult, Memory
from mcjax.transfer.transports.jax import fitted, moved
from mcjax.transfer.transports.threaded import Batch, ThreadedTransport, checksum, failure, stale
from mcjax.types import NullRecorder, Recorder

LEG_PARTS = 4
"""Calls of gather in one visit to the source's thread: what lies on both meshes twice is bounded by it."""


class Mesh(ThreadedTransport):
    """One for all nodes of a process. Copies of one batch go one after the other; batches go side by side.

    The meshes may differ: heads are cut and joined on the way (`transports.jax.moved`). Checksums are of the pages as
    they arrived on the target's devices, before they are put in place.
    """

    def __init__(self, recorder: Recorder | None = None, name: str = "mesh"):
        super().__init__(name, recorder or NullRecorder())

    def reaches(self, source: Memory, target: Memory) -> bool:
        """Both are registered, and are pages of two instances of this process, of any nodes."""
        return (
            self.knows(source)
            and self.knows(target)
            and isinstance(source, DevicePages)
            and isinstance(target, DevicePages)
            and source.executor is not target.executor
        )

    def _start(self, batch: Batch) -> None:
        """Go on with the batch's next copy, on whatever thread."""
        while (index := len(batch.results)) < len(batch.copies):
            refused = batch.refused[index]
            if refused is not None:
                batch.results.append(refused)
            elif _Crossing(batch, batch.copies[index], self._start).depart():
                return
        self._answer(batch)


@dataclass(eq=False)
class _Crossing:
    """One copy on its way. Its result is appended to the batch's, and `go_on` called, when it has ended on a thread of
    an executor's; `depart` says so itself if it ends before it gets there."""

    batch: Batch
    copy: Copy
    go_on: Callable[[Batch], None]
    done: int = 0
    """Slots that are in place."""
    checksums: list[bytes] = field(default_factory=list[bytes])

    @property
    def source(self) -> JaxExecutor:
        return _pages(self.copy.source.memory).executor

    @property
    def target(self) -> JaxExecutor:
        return _pages(self.copy.target.memory).executor

    def depart(self) -> bool:
        """Send it to the source's thread; False if it has ended instead, and has its result."""
        (source, kind), (target, other_kind) = self.source.block_layout, self.target.block_layout
        if (source, kind) != (target, other_kind):
            problem = f"pages of {source} {kind} do not fit pages of {target} {other_kind}"
            self.batch.results.append(failure(self.copy, problem, LayoutMismatch))
            return False
        try:
            self.source.submit_host(self._gather, lambda: self._lost(self.source))
        except InstanceDown as problem:
            self.batch.results.append(failure(self.copy, str(problem)))
            return False
        return True

    def _gather(self) -> None:
        """On the source's thread."""
        if self._stopped("before"):
            return
        wide = min(self.source.geometry.move_pages, self.target.geometry.move_pages)
        slots = self.copy.source.slots[self.done : self.done + LEG_PARTS * wide]
        parts: list[tuple[int, Array]] = []
        try:
            for first in range(0, len(slots), wide):
                for count, part in self.source.gather_pages(slots[first : first + wide]):
                    there = moved(fitted(part, self.target.geometry.move_pages), self.target.block_sharding)
                    parts.append((count, there))
                    if self.copy.checksum:
                        self.checksums += _sums(there, count)
        except Exception as problem:  # whoever waits must hear of it, as of a typed error
            self._end(failure(self.copy, f"{type(problem).__name__}: {problem}"))
            return
        if self._stopped("during"):
            return
        try:
            self.target.submit_host(lambda: self._scatter(parts), lambda: self._lost(self.target))
        except InstanceDown as problem:
            self._end(failure(self.copy, str(problem)))

    def _scatter(self, parts: Sequence[tuple[int, Array]]) -> None:
        """On the target's thread."""
        if self._stopped("during"):
            return
        try:
            for count, blocks in parts:
                self.target.scatter_pages(self.copy.target.slots[self.done : self.done + count], blocks)
                self.done += count
        except Exception as problem:
            self._end(failure(self.copy, f"{type(problem).__name__}: {problem}"))
            return
        if self._stopped("during", at_end=self.done == len(self.copy.source.slots)):
            return
        if self.done == len(self.copy.source.slots):
            self._end(CopyResult(checksums=tuple(self.checksums)))
        elif not self.depart():
            self.go_on(self.batch)

    def _stopped(self, when: str, at_end: bool = False) -> bool:
        """Whether it must not go on: then it has ended."""
        if self.batch.handle.cancelled and not at_end:
            self._end(failure(self.copy, "cancelled before it was done" if self.done else "cancelled before it began"))
            return True
        changed = stale(self.copy)
        if changed:
            self._end(failure(self.copy, f"{changed} changed hands {when} the copy", StaleRegion))
        return bool(changed)

    def _lost(self, executor: JaxExecutor) -> None:
        self._end(failure(self.copy, str(InstanceDown(executor.name))))

    def _end(self, result: CopyResult) -> None:
        self.batch.results.append(result)
        self.go_on(self.batch)


def _pages(memory: Memory) -> DevicePages:
    if not isinstance(memory, DevicePages):
        raise TransferError(f"{memory.name} holds no pages of an instance")
    return memory


def _sums(blocks: Array, count: int) -> list[bytes]:
    rows = np.asarray(blocks)[:count].reshape(count, -1).view(np.uint8)
    return [checksum(np.ascontiguousarray(row)) for row in rows]
