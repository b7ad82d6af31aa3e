"""The simulator's transport: sizes only, time from the link model. A run has two, inside nodes and between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from mcjax.errors import StaleRegion, TransferError
from mcjax.transfer.base import Copy, CopyResult, Memory, TransportStats
from mcjax.types import Tier

Route = Callable[[Memory, Memory], tuple[str, ...]]
"""The links that bytes from one memory to another cross."""

Reaches = Callable[[Memory, Memory], bool]

SPINE = "spine"


def device_route(source: Memory, target: Memory) -> tuple[str, ...]:
    """Inside a node: its SSDs' link if one side is there, its PCIe link if one side is on a device; inside a device's
    own memory: that."""
    if source is target and source.tier is Tier.HBM:
        return (f"hbm:{source.name}",)
    tiers = (source.tier, target.tier)
    ssd = (f"ssd:{source.node}",) if Tier.SSD in tiers else ()
    return ssd if ssd and Tier.HBM not in tiers else (*ssd, f"pcie:{source.node}")


def network_route(source: Memory, target: Memory) -> tuple[str, ...]:
    """Between nodes: out through the sender's network card, in through the receiver's; SSDs' links at either end."""
    return (
        *((f"ssd:{source.node}",) if source.tier is Tier.SSD else ()),
        f"out:{source.node}",
        f"in:{target.node}",
        *((f"ssd:{target.node}",) if target.tier is Tier.SSD else ()),
    )


def spine_route(source: Memory, target: Memory) -> tuple[str, ...]:
    """Between nodes, where what all of them send together is bounded."""
    return (*network_route(source, target), SPINE)


def carried_bytes(copy: Copy) -> int:
    """What a copy puts on its links."""
    return (copy.target if copy.source.memory.tier is Tier.DRAM else copy.source).nbytes


def same_node(source: Memory, target: Memory) -> bool:
    """What a `device` transport reaches."""
    return source.node == target.node


def other_node(source: Memory, target: Memory) -> bool:
    """What a `network` transport reaches."""
    return source.node != target.node


class Underway(Protocol):
    """A copy that has been started."""

    nbytes: int

    def cancel(self) -> None: ...


class Carrier(Protocol):
    """What says how long bytes take: `links.LinkModel`, or the threads of a measured machine."""

    def start(
        self, nbytes: int, links: tuple[str, ...], on_arrival: Callable[[Any], object], priority: int = 0
    ) -> Underway:
        """Start `nbytes` on their way over `links`; `on_arrival` is called with what this returned."""
        ...


class SimTransport:
    """A `Transport` that takes the time its bytes need on the links of `route` and moves nothing.

    Each copy is one flow. Memories of different encodings are converted between in host memory, so what crosses a link
    are the bytes of the other side. Regions are checked when a copy is submitted and again when it has
    arrived; what went stale meanwhile ends in `StaleRegion`. There are no bytes here, hence never a checksum, and slot
    numbers lead nowhere: that they lie inside their memory is for worlds with bytes to check.
    """

    def __init__(self, links: Carrier, route: Route, name: str, reaches: Reaches):
        self.name = name
        self._links = links
        self._route = route
        self._reaches = reaches
        self._memories: dict[Memory, None] = {}
        self._ways: dict[tuple[Memory, Memory], tuple[str, ...]] = {}
        """Routes between registered memories that are known to fit each other."""
        self.counted = TransportStats()

    def register(self, memory: Memory) -> None:
        self._memories[memory] = None

    def deregister(self, memory: Memory) -> None:
        self._memories.pop(memory, None)
        self._ways = {way: links for way, links in self._ways.items() if memory not in way}

    def reaches(self, source: Memory, target: Memory) -> bool:
        return self._reaches(source, target)

    def submit(self, copies: list[Copy], priority: int = 0) -> SimBatch:
        """Start every copy now. Flows of a higher priority are served first, those of one priority fairly."""
        batch = SimBatch(self, copies)
        for index, copy in enumerate(copies):
            problem = self.problem(copy)
            if problem is not None:
                batch.end(index, 0, problem)
                continue
            source = copy.source
            nbytes = carried_bytes(copy)
            self.counted.pending_bytes += nbytes
            links = self._ways[source.memory, copy.target.memory]
            batch.flows[self._links.start(nbytes, links, batch.arrived, priority)] = index
        return batch

    def stats(self) -> TransportStats:
        """Counters so far: `copies` that have ended, `errors` among them, `pending_bytes` of those under way."""
        return replace(self.counted)

    def problem(self, copy: Copy) -> TransferError | None:
        """Why `copy` cannot be made, or cannot count, as things are now."""
        source, target = copy.source, copy.target
        if (
            (source.memory, target.memory) in self._ways
            and len(source.slots) == len(target.slots)
            and source.is_current()
            and target.is_current()
        ):
            return None
        return self._look_closely(copy)

    def _look_closely(self, copy: Copy) -> TransferError | None:
        """The same, in words. Memories that fit each other are remembered from here on, with the way between them."""
        source, target = copy.source, copy.target
        for side, region in (("source", source), ("target", target)):
            memory = region.memory
            if memory not in self._memories:
                return self._error(copy, f"{side} memory {memory.name} is not registered")
            if not region.is_current():
                return self._error(copy, f"{side} region of {memory.name} is stale", StaleRegion)
        if len(source.slots) != len(target.slots):
            return self._error(copy, f"{len(source.slots)} source slots, {len(target.slots)} target slots")
        here, there = source.memory, target.memory
        whole, wanted = here.packer.block_bytes, there.packer.block_bytes
        if whole != wanted:
            return self._error(copy, f"source blocks of {whole} bytes, target blocks of {wanted}")
        if not self._reaches(here, there):
            return self._error(copy, f"no way from {here.name} to {there.name}")
        self._ways[here, there] = self._route(here, there)
        return None

    def _error(self, copy: Copy, problem: str, kind: type[TransferError] = TransferError) -> TransferError:
        return kind(f"{self.name}: {problem}", copy.request_id, copy.first_block)


class SimBatch:
    """The handle of a batch. Cancelling it gives the links back; copies that had not arrived end in `TransferError`."""

    def __init__(self, transport: SimTransport, copies: list[Copy]):
        self.flows: dict[Underway, int] = {}
        """What is under way, and which copy each flow is."""
        self._transport = transport
        self._copies = copies
        self._results = [CopyResult() for _ in copies]
        self._open = len(copies)
        self._callback: Callable[[list[CopyResult]], object] | None = None

    def when_answered(self, callback: Callable[[list[CopyResult]], object]) -> None:
        if self._open:
            self._callback = callback
        else:
            callback(self._results)

    def cancel(self) -> None:
        flows, self.flows = self.flows, {}
        for flow, index in flows.items():
            flow.cancel()
            copy = self._copies[index]
            self.end(index, flow.nbytes, TransferError("the batch was cancelled", copy.request_id, copy.first_block))

    def arrived(self, flow: Underway) -> None:
        index = self.flows.pop(flow)
        self.end(index, flow.nbytes, self._transport.problem(self._copies[index]))

    def end(self, index: int, nbytes: int, problem: TransferError | None) -> None:
        """One copy has ended, of which `nbytes` were pending."""
        stats = self._transport.counted
        stats.copies += 1
        stats.pending_bytes -= nbytes
        if problem is None:
            stats.bytes_moved += nbytes
        else:
            stats.errors += 1
            self._results[index].error = problem
        self._open -= 1
        if not self._open and self._callback is not None:
            self._callback(self._results)
