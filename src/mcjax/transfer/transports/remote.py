"""Blocks between a memory of this process and one of another: any `Endpoint` as a transport of the transfer engine.

The owner exposes its memory (`expose_memory`) and tells which slots, as of which epoch, are whose; the peer has a
`RemoteMemory`, makes regions of what it was told, and moves them as any other. Whether those slots are still in the
same hands is for the owner to say, and its endpoint asks before and after each copy.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mcjax import aio
from mcjax.errors import AccessRefused, LayoutMismatch, StaleRegion, TransferError
from mcjax.transfer.base import Copy, CopyResult, FutureHandle, Memory, Pacing, Rail, Region
from mcjax.transfer.layout.describe import Layout
from mcjax.transfer.transports.endpoint import Endpoint, Exposed, Pending, RegionDescriptor, Spans, failed
from mcjax.transfer.transports.local import runs
from mcjax.transfer.transports.threaded import Batch, ThreadedTransport, failure, stale
from mcjax.types import NullRecorder, Packer, Recorder, Tier

SLOTS = "slots"
"""Under which a descriptor's `layout` says how slots lie in the region."""

BLOCKS = "blocks"
"""Under which it says how a block lies in a slot (`transfer.layout`), where the owner knows."""


def flat(memory: Memory) -> tuple[NDArray[np.uint8], int]:
    """`([nbytes] from the first slot to the end of the last, bytes from slot to slot)`, a view. Raises `AccessRefused`
    for a memory that has no bytes on the host."""
    buffer = memory.buffer()
    if buffer is None or not len(buffer):
        raise AccessRefused(f"{memory.name} has no bytes on the host")
    stride = buffer.strides[0]
    nbytes = (memory.capacity - 1) * stride + memory.block_bytes
    return np.lib.stride_tricks.as_strided(buffer[0], (nbytes,), (1,)), stride


def expose_memory(endpoint: Endpoint, memory: Memory, writable: bool = True) -> Exposed:
    """Show a memory's slots to peers. Its descriptor says how they lie; slots that have changed hands since the epoch
    that a descriptor names are neither read nor written. Raises `AccessRefused`."""
    buffer, stride = flat(memory)

    def unchanged(offset: int, nbytes: int, epoch: int) -> bool:
        slots = range(offset // stride, (offset + nbytes - 1) // stride + 1)
        return not memory.changed_since(epoch, slots)

    slots = {
        "name": memory.name,
        "node": memory.node,
        "tier": str(memory.tier),
        "capacity": memory.capacity,
        "block_bytes": memory.block_bytes,
        "stride_bytes": stride,
        "encoding": memory.packer.name,
    }
    blocks = {} if memory.layout is None else {BLOCKS: memory.layout.to_values()}
    return endpoint.expose(buffer, writable=writable, guard=unchanged, layout={SLOTS: slots, **blocks})


class RemoteMemory:
    """A memory of another process, as its descriptors tell: one for each endpoint that leads there, by the endpoint's
    name. No slot of it is ever free here; `region` makes regions of slots that the owner has told."""

    def __init__(self, descriptors: Mapping[str, RegionDescriptor], packer: Packer, layout: Layout | None = None):
        """`packer`, `layout`: how blocks rest there, which must be what the owner says. Raises `LayoutMismatch`,
        `AccessRefused` for descriptors that are not of a memory, or not of one."""
        self.descriptors = dict(descriptors)
        told = [descriptor.layout.get(SLOTS) for descriptor in self.descriptors.values()]
        lie = [descriptor.layout.get(BLOCKS) for descriptor in self.descriptors.values()]
        if not told or any(slots != told[0] for slots in told) or any(blocks != lie[0] for blocks in lie):
            raise AccessRefused("the descriptors are not of one memory")
        slots = _slots_of(told[0])
        self.name: str = f"{slots['name']}@remote"
        self.node: str = slots["node"]
        self.tier = Tier(slots["tier"])
        self.capacity: int = slots["capacity"]
        self.block_bytes: int = slots["block_bytes"]
        self.stride_bytes: int = slots["stride_bytes"]
        self.packer = packer
        self.layout = layout if lie[0] is None else _layout_of(lie[0])
        if layout is not None and self.layout is not None and (differences := self.layout.differences(layout)):
            raise LayoutMismatch(f"blocks of {self.name}: {'; '.join(differences)}")
        if (packer.name, packer.packed_bytes) != (slots["encoding"], self.block_bytes):
            here = f"{packer.name} of {packer.packed_bytes} bytes"
            raise LayoutMismatch(f"{self.name} holds {slots['encoding']} of {self.block_bytes} bytes, not {here}")
        self.epoch = 0
        self.told = np.full(self.capacity, -1, np.int64)
        """The owner's epoch as of which each slot was told; -1 for those that never were."""

    def region(self, slots: Sequence[int], epoch: int) -> Region:
        """Slots that the owner says are ours, as of its `epoch`. What was told of them before is stale from now on."""
        self.told[list(slots)] = epoch
        self.epoch = max(self.epoch, epoch)
        return Region(self, tuple(slots), epoch)

    def changed_since(self, epoch: int, slots: Sequence[int]) -> bool:
        return bool((self.told[list(slots)] > epoch).any())

    def buffer(self) -> NDArray[np.uint8] | None:
        return None

    def hold(self, region: Region) -> None:
        """The owner holds what it has told, until it is told to let go."""

    def let_go(self, region: Region) -> None:
        """As `hold`."""

    def settle(self, slots: Sequence[int]) -> None:
        """The owner's business."""


def _layout_of(told: object) -> Layout:
    """Raises `LayoutMismatch` for what is none."""
    if not isinstance(told, dict):
        raise LayoutMismatch("not a layout: no mapping")
    return Layout.from_values(cast("dict[str, Any]", told))


def _slots_of(told: object) -> dict[str, Any]:
    """Raises `AccessRefused` for what is no such description, or one that cannot be."""
    kinds = {"name": str, "node": str, "tier": str, "encoding": str}
    kinds |= {"capacity": int, "block_bytes": int, "stride_bytes": int}
    slots = cast(dict[str, Any], told) if isinstance(told, dict) else {}
    if any(type(slots.get(name)) is not kind for name, kind in kinds.items()):
        raise AccessRefused("the region is not one of slots")
    if not (slots["capacity"] > 0 and 0 < slots["block_bytes"] <= slots["stride_bytes"] < 1 << 40):
        raise AccessRefused("slots that cannot be")
    if slots["tier"] not in {str(tier) for tier in Tier}:
        raise AccessRefused(f"no tier is called {slots['tier']}")
    return slots


class _Handle(FutureHandle):
    """Gives up what is on its way, too."""

    def __init__(self) -> None:
        super().__init__(aio.new_future())
        self.flight: _Flight | None = None

    def cancel(self) -> None:
        super().cancel()
        if self.flight is not None:
            self.flight.abandon()


class RemoteTransport(ThreadedTransport):
    """A transport over one endpoint, between memories of this process and `RemoteMemory`s that it leads to.

    Args:
        endpoint: the caller's, who closes it after this.
        deadline_s: of one copy, should the engine not be quicker to give up.
        pacing: how much is under way at a time to one peer; what waits then waits in the engine, by class.

    The path to each peer is one of its own (`rails`), so that the engine sees one peer fail, and not all.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        recorder: Recorder | None = None,
        deadline_s: float = 60.0,
        pacing: Pacing | None = None,
    ):
        super().__init__(endpoint.name, recorder or NullRecorder())
        self.pacing = pacing or Pacing(slice_bytes=16 << 20, window_bytes=64 << 20)
        self._endpoint = endpoint
        self._deadline_s = deadline_s
        self._exposed: dict[str, tuple[Exposed, int]] = {}

    def register(self, memory: Memory) -> None:
        """As `ThreadedTransport.register`; a memory of this process is exposed, though nobody is told of it."""
        super().register(memory)
        if memory.name not in self._exposed and not isinstance(memory, RemoteMemory) and memory.buffer() is not None:
            buffer, stride = flat(memory)
            self._exposed[memory.name] = self._endpoint.expose(buffer), stride

    def deregister(self, memory: Memory) -> None:
        known = self.knows(memory)
        super().deregister(memory)
        if known and memory.name in self._exposed:
            self._endpoint.withdraw(self._exposed.pop(memory.name)[0])

    def reaches(self, source: Memory, target: Memory) -> bool:
        """One of them is here, the other where the endpoint leads; and both encode alike, as nobody converts."""
        far = [memory for memory in (source, target) if isinstance(memory, RemoteMemory)]
        near = [memory for memory in (source, target) if memory.name in self._exposed]
        if len(far) != 1 or len(near) != 1 or not (self.knows(source) and self.knows(target)):
            return False
        can = self._endpoint.capabilities
        return (
            self.name in far[0].descriptors
            and source.packer.name == target.packer.name
            and (can.read if source is far[0] else can.write)
        )

    def rails(self, source: Memory, target: Memory) -> Sequence[Rail]:
        far = source if isinstance(source, RemoteMemory) else target
        assert isinstance(far, RemoteMemory)
        return (Rail(remote=far.descriptors[self.name].address),)

    def submit(self, copies: list[Copy], priority: int = 0, rail: Rail | None = None) -> FutureHandle:
        """As `Transport.submit`; there is one rail only."""
        return super().submit(copies, priority)

    def close(self) -> None:
        """Take back what was exposed. May be called twice."""
        for exposed, _ in self._exposed.values():
            self._endpoint.withdraw(exposed)
        self._exposed.clear()

    def _new_handle(self) -> FutureHandle:
        return _Handle()

    def _start(self, batch: Batch) -> None:
        flight = _Flight(self, batch)
        if isinstance(batch.handle, _Handle):
            batch.handle.flight = flight
        for index, copy in enumerate(batch.copies):
            refused = batch.refused[index]
            changed = "" if refused else stale(copy)
            if changed:
                refused = failure(copy, f"{changed} changed hands before the copy", StaleRegion)
            if refused is not None:
                flight.results[index] = refused
                continue
            for part in self._parts(copy):
                flight.began(index, part, self._move(copy, part))
        flight.all_begun()

    def _parts(self, copy: Copy) -> Iterator[NDArray[np.int64]]:
        """Positions in the copy, `[n]`, of blocks that were told as of one epoch. One part, as a rule."""
        far = copy.source if isinstance(copy.source.memory, RemoteMemory) else copy.target
        assert isinstance(far.memory, RemoteMemory)
        epochs = far.memory.told[list(far.slots)]
        for epoch in np.unique(epochs):
            yield np.flatnonzero(epochs == epoch)

    def _move(self, copy: Copy, part: NDArray[np.int64]) -> Pending:
        reading = isinstance(copy.source.memory, RemoteMemory)
        here, there = (copy.target, copy.source) if reading else (copy.source, copy.target)
        assert isinstance(there.memory, RemoteMemory)
        exposed, stride = self._exposed[here.memory.name]
        positions: list[int] = part.tolist()
        near, far = [here.slots[at] for at in positions], [there.slots[at] for at in positions]
        block, far_stride = there.memory.block_bytes, there.memory.stride_bytes
        if not copy.checksum and stride == block == far_stride:
            rows = ((first * stride, second * stride, count * block) for first, second, count in runs(near, far))
        else:  # a span a block: each has its checksum, or there is padding between them
            rows = ((first * stride, second * far_stride, block) for first, second in zip(near, far, strict=True))
        epoch = int(there.memory.told[far[0]])
        known = there.memory.descriptors[self.name]
        detail, layout = dict(known.detail), dict(known.layout)
        remote = RegionDescriptor(known.address, known.key, known.nbytes, max(0, epoch), known.writable, detail, layout)
        if epoch < 0:
            return _refused(AccessRefused("slots that the owner never told"))
        spans = Spans.of(rows)
        if reading:
            return self._endpoint.read(exposed, remote, spans, deadline_s=self._deadline_s, checksums=copy.checksum)
        return self._endpoint.write(exposed, remote, spans, deadline_s=self._deadline_s, checksums=copy.checksum)

    def finished(self, batch: Batch, results: list[CopyResult]) -> None:
        """Every copy of the batch has its result. On any thread."""
        batch.results.extend(results)
        self._answer(batch)


class _Flight:
    """What of a batch the endpoint has not answered yet."""

    def __init__(self, transport: RemoteTransport, batch: Batch):
        self.results: dict[int, CopyResult] = {}
        self._transport = transport
        self._batch = batch
        self._lock = threading.Lock()
        self._left = 1
        """One for `all_begun`: nothing is finished before everything has begun."""
        self._pending: list[tuple[int, NDArray[np.int64], Pending]] = []

    def began(self, index: int, part: NDArray[np.int64], pending: Pending) -> None:
        self._pending.append((index, part, pending))
        with self._lock:
            self._left += 1
        pending.add_done_callback(lambda _: self._one_less())

    def all_begun(self) -> None:
        self._one_less()

    def abandon(self) -> None:
        for _, _, pending in self._pending:
            pending.abandon()

    def _one_less(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        by_copy = itertools.groupby(self._pending, key=lambda entry: entry[0])
        for index, parts in by_copy:
            copy = self._batch.copies[index]
            self.results[index] = _result(copy, [(part, pending) for _, part, pending in parts])
        self._transport.finished(self._batch, [self.results[index] for index in range(len(self._batch.copies))])


def _result(copy: Copy, parts: list[tuple[NDArray[np.int64], Pending]]) -> CopyResult:
    """Of one copy, all parts of which have been answered."""
    checksums = [b""] * len(copy.source.slots)
    for part, pending in parts:
        results = pending.result(0)
        if results.errors:
            error = next((e for e in results.errors.values() if isinstance(e, StaleRegion)), None)
            error = error or next(iter(results.errors.values()))
            return failure(copy, error.problem, type(error))
        for at, digest in zip(part.tolist(), results.checksums, strict=False):
            checksums[at] = digest
    changed = stale(copy)
    if changed:
        return failure(copy, f"{changed} changed hands during the copy; what arrived must not be used", StaleRegion)
    return CopyResult(checksums=tuple(checksums) if copy.checksum else ())


def _refused(error: TransferError) -> Pending:
    return failed(Pending(), 1, lambda: error)
