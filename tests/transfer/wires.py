"""A transport of several rails in virtual time, each of which may be slow, fail, or hang when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from mcjax import aio
from mcjax.errors import TransferError
from mcjax.kvpool.stores.slots import SlotStore
from mcjax.transfer.base import Copy, CopyResult, FutureHandle, Memory, Pacing, Rail, TransportStats
from mcjax.types import NS_PER_S, Tier


@dataclass
class Wire:
    """One NIC. `down`: copies fail at once; `hangs`: they are never answered until it is mended."""

    bytes_per_s: float = 1000.0
    down: bool = False
    hangs: bool = False
    free_ns: int = 0
    carried_bytes: int = 0
    hanging: list[tuple[list[Copy], FutureHandle]] = field(default_factory=list)


class Wires:
    """Copies take turns on each wire; `delivered` are pairs of slots, as they arrive in regions that are current."""

    name = "wires"

    def __init__(self, rails: Sequence[Rail], pacing: Pacing | None = None):
        if pacing is not None:
            self.pacing = pacing
        self._rails = tuple(rails)
        self.wires = {rail.local: Wire() for rail in rails}
        self.delivered: list[tuple[int, int]] = []
        self.most_under_way = dict.fromkeys(self.wires, 0)
        self._under_way = dict.fromkeys(self.wires, 0)
        self.submitted: list[tuple[int, str, int, int]] = []
        """When, on which wire, of which class, how many blocks."""

    def register(self, memory: Memory) -> None:
        pass

    def deregister(self, memory: Memory) -> None:
        pass

    def reaches(self, source: Memory, target: Memory) -> bool:
        return True

    def rails(self, source: Memory, target: Memory) -> Sequence[Rail]:
        return self._rails

    def stats(self) -> TransportStats:
        return TransportStats()

    def submit(self, copies: list[Copy], priority: int = 0, rail: Rail | None = None) -> FutureHandle:
        assert rail is not None
        wire, handle = self.wires[rail.local], FutureHandle(asyncio.get_running_loop().create_future())
        now_ns, nbytes = aio.now_ns(), sum(copy.source.nbytes for copy in copies)
        self.submitted.append((now_ns, rail.local, priority, sum(len(copy.source.slots) for copy in copies)))
        self._under_way[rail.local] += nbytes
        self.most_under_way[rail.local] = max(self.most_under_way[rail.local], self._under_way[rail.local])
        if wire.down:
            aio.clock().call_soon(self._end, copies, handle, rail.local, True)
        elif wire.hangs:
            wire.hanging.append((copies, handle))
        else:
            wire.free_ns = max(wire.free_ns, now_ns) + round(nbytes / wire.bytes_per_s * NS_PER_S)
            wire.carried_bytes += nbytes
            aio.clock().call_at_ns(wire.free_ns, self._end, copies, handle, rail.local, False)
        return handle

    def mend(self, name: str) -> None:
        """What hung arrives now, late."""
        wire = self.wires[name]
        wire.down = wire.hangs = False
        hanging, wire.hanging = wire.hanging, []
        for copies, handle in hanging:
            self._end(copies, handle, name, False)

    def _end(self, copies: list[Copy], handle: FutureHandle, name: str, fails: bool) -> None:
        self._under_way[name] -= sum(copy.source.nbytes for copy in copies)
        results: list[CopyResult] = []
        for copy in copies:
            if fails or handle.cancelled:
                results.append(CopyResult(TransferError("the wire is down", copy.request_id, copy.first_block)))
                continue
            self.delivered += zip(copy.source.slots, copy.target.slots, strict=True)
            sums = tuple(f"{slot}".encode() for slot in copy.source.slots) if copy.checksum else ()
            results.append(CopyResult(checksums=sums))
        handle.future.set_result(results)


def rails(count: int, distances: Sequence[int] = (), crossing: Sequence[str] = ()) -> list[Rail]:
    """`n0` to `n0`, `n1` to `n1` and so on."""
    names = [f"n{index}" for index in range(count)]
    far = [*distances, *([0] * count)]
    return [Rail(name, name, far[index], name in crossing, 1000.0) for index, name in enumerate(names)]


def stores(blocks: int, block_bytes: int = 10) -> tuple[SlotStore, SlotStore]:
    return SlotStore("a", Tier.DRAM, blocks, block_bytes), SlotStore("b", Tier.DRAM, blocks, block_bytes)
