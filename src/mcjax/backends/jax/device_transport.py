"""Moves blocks between an instance's pages and the host memory of its node, on the executor's thread, between steps."""

from __future__ import annotations

from functools import partial

from mcjax.backends.jax.device_store import DevicePages
from mcjax.backends.jax.executor import JaxExecutor
from mcjax.errors import InstanceDown
from mcjax.transfer.base import Copy, Memory
from mcjax.transfer.transports.threaded import Batch, Move, ThreadedTransport, checksum
from mcjax.types import NullRecorder, Recorder


class Device(ThreadedTransport):
    """One for all nodes: a copy runs on the thread of the executor that owns its device side.

    Copies of one batch run in order; neighbours of the same executor share one visit to its thread.
    """

    def __init__(self, recorder: Recorder | None = None, name: str = "device"):
        super().__init__(name, recorder or NullRecorder())

    def reaches(self, source: Memory, target: Memory) -> bool:
        """Both are registered, lie on one node, and exactly one is an instance's pages."""
        known = self.knows(source) and self.knows(target) and source.node == target.node
        if isinstance(source, DevicePages) == isinstance(target, DevicePages):
            return False
        host = target if isinstance(source, DevicePages) else source
        return known and host.buffer() is not None

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
                executor.submit_host(partial(self._hand_on, batch, last))
                return
            except InstanceDown:
                self._visit(batch, last, _gone)
        self._answer(batch)

    def _hand_on(self, batch: Batch, last: int) -> None:
        self._visit(batch, last, _move)
        self._start(batch)

    def _visit(self, batch: Batch, last: int, move: Move) -> None:
        for index in range(len(batch.results), last):
            self._perform(batch, index, move)


def _gone(copy: Copy) -> tuple[bytes, ...]:
    executor = _executor(copy)
    raise InstanceDown(executor.name if executor else "")


def _executor(copy: Copy) -> JaxExecutor | None:
    for region in (copy.source, copy.target):
        if isinstance(region.memory, DevicePages):
            return region.memory.executor
    return None


def _move(copy: Copy) -> tuple[bytes, ...]:
    source, target = copy.source.memory, copy.target.memory
    if isinstance(source, DevicePages):
        host = target.buffer()
        assert host is not None  # `reaches` said so when the batch came in
        blocks = source.executor.read_pages(copy.source.slots)
        for slot, block in zip(copy.target.slots, blocks, strict=True):
            host[slot] = block
    else:
        assert isinstance(target, DevicePages)
        host = source.buffer()
        assert host is not None
        blocks = host[list(copy.source.slots)]
        target.executor.write_pages(copy.target.slots, blocks)
    return tuple(checksum(block) for block in blocks) if copy.checksum else ()
