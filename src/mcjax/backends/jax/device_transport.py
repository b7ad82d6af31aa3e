"""Moves blocks between an instance's pages and the host memory of its node, or from page to page of one instance:
on the thread of its executor, between steps."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mcjax.backends.jax.device_store import DevicePages
from mcjax.backends.jax.executor import JaxExecutor
from mcjax.errors import InstanceDown
from mcjax.transfer.base import Copy, CopyResult, Memory
from mcjax.transfer.transports.threaded import Batch, Move, ThreadedTransport, checksum, convert
from mcjax.types import NullRecorder, Recorder


class Device(ThreadedTransport):
    """One for all nodes: a copy runs on the thread of the executor that owns its device side.

    Copies of one batch run in order; neighbours of the same executor share one visit to its thread.
    """

    def __init__(self, recorder: Recorder | None = None, name: str = "device"):
        super().__init__(name, recorder or NullRecorder())

    def reaches(self, source: Memory, target: Memory) -> bool:
        """Both are registered, and are an instance's pages and a memory of its node's host, or twice the same pages."""
        if not (self.knows(source) and self.knows(target) and source.node == target.node):
            return False
        if isinstance(source, DevicePages) and isinstance(target, DevicePages):
            return source.executor is target.executor
        host = target if isinstance(source, DevicePages) else source
        return isinstance(source, DevicePages) != isinstance(target, DevicePages) and host.buffer() is not None

    def _start(self, batch: Batch) -> None:
        while (first := len(batch.results)) < len(batch.copies):
            executor = _executor(batch.copies[first])
            last = first + 1
            while last < len(batch.copies) and _executor(batch.copies[last]) is executor:
                last += 1
            if executor is None:  # no device side: these were refused, and only their results remain to be written down
                self._visit(batch, last, _gone)
                continue
            try:
                executor.submit_host(
                    partial(self._hand_on, batch, last, _move), partial(self._hand_on, batch, last, _gone)
                )
                return
            except InstanceDown:
                self._visit(batch, last, _gone)
        self._answer(batch)

    def _hand_on(self, batch: Batch, last: int, move: Move) -> None:
        self._visit(batch, last, move)
        self._start(batch)

    def _visit(self, batch: Batch, last: int, move: Move) -> None:
        for index in range(len(batch.results), last):
            self._perform(batch, index, move)


def _gone(copy: Copy) -> CopyResult:
    executor = _executor(copy)
    raise InstanceDown(executor.name if executor else "")


def _executor(copy: Copy) -> JaxExecutor | None:
    for region in (copy.source, copy.target):
        if isinstance(region.memory, DevicePages):
            return region.memory.executor
    return None


def _move(copy: Copy) -> CopyResult:
    source, target = copy.source.memory, copy.target.memory
    if isinstance(source, DevicePages) and isinstance(target, DevicePages):
        source.executor.copy_pages(copy.source.slots, copy.target.slots)
        return CopyResult(checksums=_sums(copy, source.executor.read_pages(copy.target.slots) if copy.checksum else ()))
    if isinstance(source, DevicePages):
        return _off_device(copy, source, target)
    assert isinstance(target, DevicePages)
    return _onto_device(copy, source, target)


def _off_device(copy: Copy, source: DevicePages, target: Memory) -> CopyResult:
    host = target.buffer()
    assert host is not None  # `reaches` said so when the batch came in
    blocks = source.executor.read_pages(copy.source.slots)
    for slot, block in zip(copy.target.slots, blocks, strict=True):
        host[slot] = convert(block, source, target)
    if source.packer.name == target.packer.name:
        return CopyResult(checksums=_sums(copy, blocks))
    return CopyResult(checksums=_sums(copy, blocks), converted=_sums(copy, (host[slot] for slot in copy.target.slots)))


def _onto_device(copy: Copy, source: Memory, target: DevicePages) -> CopyResult:
    host = source.buffer()
    assert host is not None
    blocks = host[list(copy.source.slots)]
    if source.packer.name == target.packer.name:
        target.executor.write_pages(copy.target.slots, blocks)
        return CopyResult(checksums=_sums(copy, blocks))
    whole = np.empty((len(blocks), target.block_bytes), np.uint8)
    for row, block in zip(whole, blocks, strict=True):
        row[:] = convert(block, source, target)
    target.executor.write_pages(copy.target.slots, whole)
    return CopyResult(checksums=_sums(copy, blocks), converted=_sums(copy, whole))


def _sums(copy: Copy, blocks: Iterable[NDArray[np.uint8]]) -> tuple[bytes, ...]:
    return tuple(checksum(block) for block in blocks) if copy.checksum else ()
