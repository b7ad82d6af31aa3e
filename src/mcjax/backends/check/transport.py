"""The checking transport: real bytes between byte stores, with faults injected on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import xxhash

from mcjax import aio
from mcjax.backends.check.faults import FaultCounts, Faults
from mcjax.errors import StaleRegion, TierUnavailable, TransferError
from mcjax.transfer.base import Copy, CopyResult, FutureHandle, Memory, TransportStats
from mcjax.types import NS_PER_S, Tier

LATENCY_S = (0.1e-3, 1e-3)
BLOCK_S = 50e-6
GIVE_UP_S = 0.6
LATE_S = (0.25, 0.5)
AGAIN_S = (0.05, 0.4)


class CheckTransport:
    """Copies at arrival time, so that whatever happened to source or target meanwhile matters.

    It always answers, if only with an error after `GIVE_UP_S`, as a network card does.
    """

    def __init__(
        self,
        name: str,
        reaches: Callable[[Memory, Memory], bool],
        faults: Faults,
        counts: FaultCounts,
        rng: np.random.Generator,
        outages_ns: Mapping[str, int] | None = None,
    ):
        """`outages_ns`: until when the SSD of a node refuses everything."""
        self.name = name
        self._reaches = reaches
        self._faults = faults
        self._counts = counts
        self._rng = rng
        self._outages_ns = dict[str, int]() if outages_ns is None else outages_ns
        self._memories: dict[Memory, None] = {}
        self._stats = TransportStats()

    def register(self, memory: Memory) -> None:
        self._memories[memory] = None

    def deregister(self, memory: Memory) -> None:
        self._memories.pop(memory, None)

    def reaches(self, source: Memory, target: Memory) -> bool:
        return self._reaches(source, target)

    def stats(self) -> TransportStats:
        return self._stats

    def submit(self, copies: list[Copy], priority: int = 0) -> FutureHandle:
        handle = FutureHandle(aio.new_future())
        blocks = sum(len(copy.source.slots) for copy in copies)
        duration_s = self._rng.uniform(*LATENCY_S) + blocks * BLOCK_S
        disk = next((memory for copy in copies for memory in _ends(copy) if memory.tier is Tier.SSD), None)
        if disk is not None and self._fails(disk):
            aio.clock().call_at_ns(aio.now_ns() + round(duration_s * NS_PER_S), self._fail, copies, handle)
            return handle
        if self._hit("slow", self._faults.slow):
            duration_s *= 100
        if self._hit("late", self._faults.late):
            duration_s += self._rng.uniform(*LATE_S)
        clock, now_ns = aio.clock(), aio.now_ns()
        if self._hit("lost", self._faults.lost):
            clock.call_at_ns(now_ns + round(GIVE_UP_S * NS_PER_S), self._lose, copies, handle)
            return handle
        clock.call_at_ns(now_ns + round(duration_s * NS_PER_S), self._arrive, copies, handle)
        if self._hit("duplicated", self._faults.duplicated):
            again_s = duration_s + self._rng.uniform(*AGAIN_S)
            clock.call_at_ns(now_ns + round(again_s * NS_PER_S), self._arrive, copies, None)
        return handle

    def _hit(self, kind: str, probability: float) -> bool:
        if probability == 0.0 or self._rng.random() >= probability:
            return False
        self._counts.note(kind)
        return True

    def _fails(self, disk: Memory) -> bool:
        return aio.now_ns() < self._outages_ns.get(disk.node, 0) or self._hit("ssd_failed", self._faults.ssd_failed)

    def _fail(self, copies: list[Copy], handle: FutureHandle) -> None:
        error = TierUnavailable("the SSD failed it", copies[0].request_id, copies[0].first_block)
        self._answer(handle, [CopyResult(error) for _ in copies])

    def _lose(self, copies: list[Copy], handle: FutureHandle) -> None:
        error = TransferError("the network gave it up", copies[0].request_id, copies[0].first_block)
        self._answer(handle, [CopyResult(error) for _ in copies])

    def _arrive(self, copies: list[Copy], handle: FutureHandle | None) -> None:
        results = [self._copy(copy) for copy in copies]
        if handle is not None:
            self._answer(handle, results)

    @staticmethod
    def _answer(handle: FutureHandle, results: list[CopyResult]) -> None:
        if not handle.future.done():
            handle.future.set_result(results)

    def _copy(self, copy: Copy) -> CopyResult:
        source, target = copy.source, copy.target
        if source.memory not in self._memories or target.memory not in self._memories:
            return self._refuse(TransferError("a memory is not registered", copy.request_id, copy.first_block))
        if not self.is_current(copy):
            return self._refuse(StaleRegion("a region changed hands", copy.request_id, copy.first_block))
        read, written = source.memory.buffer(), target.memory.buffer()
        assert read is not None
        assert written is not None
        checksums: list[bytes] = []
        for before, after in zip(source.slots, target.slots, strict=True):
            written[after] = read[before]
            if copy.checksum:
                checksums.append(xxhash.xxh3_128_digest(read[before].tobytes()))
        if target.memory.tier is not Tier.HBM and self._hit("corrupted", self._faults.corrupted):
            slot = target.slots[int(self._rng.integers(len(target.slots)))]
            written[slot, int(self._rng.integers(target.memory.block_bytes))] ^= 1 << int(self._rng.integers(8))
        self._stats.bytes_moved += source.nbytes
        self._stats.copies += 1
        return CopyResult(checksums=tuple(checksums))

    def is_current(self, copy: Copy) -> bool:
        """Whether both regions still belong to whoever asked for the copy."""
        return copy.source.is_current() and copy.target.is_current()

    def _refuse(self, error: TransferError) -> CopyResult:
        self._stats.errors += 1
        return CopyResult(error)


def _ends(copy: Copy) -> tuple[Memory, Memory]:
    return copy.source.memory, copy.target.memory
