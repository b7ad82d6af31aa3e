"""The simulator's transport: sizes only, time from the link model. A run has two, inside nodes and between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from mcjax.backends.sim.links import Flow, LinkModel
from mcjax.errors import StaleRegion, TransferError
from mcjax.transfer.base import Copy, CopyResult, Memory, Region, TransportStats

Route = Callable[[Memory, Memory], tuple[str, ...]]
"""The links that bytes from one memory to another cross."""

Reaches = Callable[[Memory, Memory], bool]


def device_route(source: Memory, target: Memory) -> tuple[str, ...]:
    """Between device and host memory of one node: its PCIe link."""
    return (f"pcie:{source.node}",)


def network_route(source: Memory, target: Memory) -> tuple[str, ...]:
    """Between nodes: out through the sender's network card, in through the receiver's."""
    return (f"out:{source.node}", f"in:{target.node}")


def same_node(source: Memory, target: Memory) -> bool:
    """What a `device` transport reaches."""
    return source.node == target.node


def other_node(source: Memory, target: Memory) -> bool:
    """What a `network` transport reaches."""
    return source.node != target.node


class SimTransport:
    """A `Transport` that takes the time its bytes need on the links of `route` and moves nothing.

    Each copy is one flow of `source.nbytes` bytes. Regions are checked when a copy is submitted and again when it has
    arrived; what went stale meanwhile ends in `StaleRegion`. There are no bytes here, hence never a checksum.
    """

    def __init__(self, links: LinkModel, route: Route, name: str, reaches: Reaches):
        self.name = name
        self._links = links
        self._route = route
        self._reaches = reaches
        self._memories: dict[Memory, None] = {}
        self._stats = TransportStats()

    def register(self, memory: Memory) -> None:
        self._memories[memory] = None

    def deregister(self, memory: Memory) -> None:
        self._memories.pop(memory, None)

    def reaches(self, source: Memory, target: Memory) -> bool:
        return self._reaches(source, target)

    def submit(self, copies: list[Copy], priority: int = 0) -> SimBatch:
        """Start every copy now. `priority` changes nothing: links are shared fairly by all flows."""
        batch = SimBatch(len(copies))
        for index, copy in enumerate(copies):
            problem = self._problem(copy)
            if problem is not None:
                self._end(batch, index, 0, problem)
                continue
            source, target = copy.source, copy.target
            nbytes = source.nbytes
            flow = self._links.start(nbytes, self._route(source.memory, target.memory))
            self._stats.pending_bytes += nbytes
            batch.flows[index] = flow
            flow.add_done_callback(partial(self._arrived, batch, index, copy, nbytes))
        return batch

    def stats(self) -> TransportStats:
        """Counters so far: `copies` that have ended, `errors` among them, `pending_bytes` of those under way."""
        stats = self._stats
        return TransportStats(stats.bytes_moved, stats.copies, stats.errors, stats.pending_bytes)

    def _arrived(self, batch: SimBatch, index: int, copy: Copy, nbytes: int, flow: asyncio.Future[int]) -> None:
        self._stats.pending_bytes -= nbytes
        del batch.flows[index]
        if flow.cancelled():
            problem = TransferError("the batch was cancelled", copy.request_id, copy.first_block)
        else:
            problem = self._stale(copy)
        self._end(batch, index, nbytes, problem)

    def _end(self, batch: SimBatch, index: int, nbytes: int, problem: TransferError | None) -> None:
        self._stats.copies += 1
        if problem is None:
            self._stats.bytes_moved += nbytes
        else:
            self._stats.errors += 1
        batch.end(index, CopyResult(problem))

    def _problem(self, copy: Copy) -> TransferError | None:
        """Why `copy` cannot be made, or cannot count, as things are now."""
        source, target = copy.source, copy.target
        for side, region in (("source", source), ("target", target)):
            problem = self._refusal(side, region)
            if problem:
                return TransferError(f"{self.name}: {problem}", copy.request_id, copy.first_block)
        stale = self._stale(copy)
        if stale is not None:
            return stale
        problem = ""
        if len(source.slots) != len(target.slots):
            problem = f"{len(source.slots)} source slots, {len(target.slots)} target slots"
        elif source.memory.block_bytes != target.memory.block_bytes:
            problem = f"source slots of {source.memory.block_bytes} bytes, target slots of {target.memory.block_bytes}"
        elif not self._reaches(source.memory, target.memory):
            problem = f"no way from {source.memory.name} to {target.memory.name}"
        return TransferError(f"{self.name}: {problem}", copy.request_id, copy.first_block) if problem else None

    def _stale(self, copy: Copy) -> TransferError | None:
        """What can change while a copy is under way: a slot's owner, or that a memory is known at all."""
        for side, region in (("source", copy.source), ("target", copy.target)):
            if region.memory not in self._memories:
                problem = f"{self.name}: {side} memory {region.memory.name} is not registered"
                return TransferError(problem, copy.request_id, copy.first_block)
            if not region.is_current():
                problem = f"{self.name}: {side} region of {region.memory.name} is stale"
                return StaleRegion(problem, copy.request_id, copy.first_block)
        return None

    def _refusal(self, side: str, region: Region) -> str:
        memory = region.memory
        if memory not in self._memories:
            return f"{side} memory {memory.name} is not registered"
        slots = region.slots
        if slots and not 0 <= min(slots) <= max(slots) < memory.capacity:
            return f"{side} slots {min(slots)}..{max(slots)} of {memory.name}, which has {memory.capacity}"
        if len(region.generations) != len(slots):
            return f"{side} region of {memory.name}: {len(slots)} slots, {len(region.generations)} generations"
        return ""


class SimBatch:
    """The handle of a batch. Cancelling it gives the links back; copies that had not arrived end in `TransferError`."""

    def __init__(self, copies: int):
        self.future: asyncio.Future[list[CopyResult]] = asyncio.get_running_loop().create_future()
        self.flows: dict[int, Flow] = {}
        self._results: list[CopyResult | None] = [None] * copies
        self._open = copies
        if not copies:
            self.future.set_result([])

    def cancel(self) -> None:
        for flow in list(self.flows.values()):
            flow.cancel()

    def end(self, index: int, result: CopyResult) -> None:
        self._results[index] = result
        self._open -= 1
        if not self._open and not self.future.done():
            self.future.set_result([result for result in self._results if result is not None])
