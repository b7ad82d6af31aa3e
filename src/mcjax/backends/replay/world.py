"""A real run's mechanisms, played from its log: each answers at the time, and with the words, that were recorded.

On the virtual loop the procedures then meet the same wake-ups in the same order as they did for real.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mcjax import aio
from mcjax.backends.progress import decode_progress
from mcjax.backends.recovered import decode_recovered, mechanism
from mcjax.backends.virtual import VirtualLoop
from mcjax.cost.base import CostModel
from mcjax.cost.padded import Padded
from mcjax.engine.base import Capacity, InstanceParts, OnStep, Progress, StepPlan, Watcher
from mcjax.engine.cluster_spec import node_of
from mcjax.errors import RunError
from mcjax.kvpool.base import Stored
from mcjax.kvpool.encodings.none import AsComputed
from mcjax.kvpool.keys import KeyTable
from mcjax.kvpool.stores.null import NullStore
from mcjax.transfer.base import Copy, FutureHandle, Memory, Pacing, Rail, Transport, TransportStats
from mcjax.transfer.transports.local import PACING
from mcjax.transfer.transports.threaded import decode_results
from mcjax.types import KVFormat, KVGroup, Packer, Recorder, Role, Tier

T = TypeVar("T")


class Log:
    """The outcomes of a run, by mechanism and call."""

    def __init__(self, rows: Sequence[tuple[int, str, int, str]]):
        self._rows = {(mechanism, call): (time_ns, payload) for time_ns, mechanism, call, payload in rows}
        self._answered: dict[tuple[str, int], None] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def answer(self, mechanism: str, call: int) -> tuple[int, dict[str, Any]] | None:
        """`(time_ns, payload)`, or None if the run ended before this call was answered."""
        found = self._rows.get((mechanism, call))
        if found is None:
            return None
        self._answered[mechanism, call] = None
        return found[0], json.loads(found[1])

    def setting(self, mechanism: str) -> dict[str, Any]:
        """What was measured or fixed before the run's time began. Raises `RunError` if the log has none."""
        found = self.answer(mechanism, 0)
        if found is None:
            raise RunError(
                f"the run's outcomes hold no {mechanism!r}: it was not a run of the real engine, or of another version"
            )
        return found[1]

    def unanswered(self) -> int:
        """Logged answers that nobody has asked for: the replay took another way."""
        return len(self._rows) - len(self._answered)


class ReplayExecutor:
    """Answers its n-th plan with the n-th logged progress."""

    def __init__(self, name: str, capacity: Capacity, log: Log):
        self.name = name
        self._capacity = capacity
        self._log = log
        self._calls = 0
        self._busy_ns = 0

    def capacity(self) -> Capacity:
        return self._capacity

    def busy_ns(self) -> int:
        return self._busy_ns

    def step_ends_ns(self) -> NDArray[np.int64]:
        return np.zeros(0, np.int64)  # as the real one, it learns of steps when the plan is done

    def interrupt(self) -> None:
        pass  # what it led to is in the log

    async def run(self, plan: StepPlan, max_steps: int, on_step: OnStep | None = None) -> Progress:
        found = self._log.answer(self.name, self._calls)
        self._calls += 1
        if found is None:
            await aio.new_future()
            raise AssertionError("unreachable")
        await aio.sleep_until_ns(found[0])
        progress = decode_progress(found[1])
        if len(progress.tokens) != len(plan.items):
            raise RunError(
                f"{self.name}: the log answers a plan of {len(progress.tokens)} items, not of {len(plan.items)}"
            )
        self._busy_ns += int(progress.ends_ns[-1]) - progress.start_ns
        return progress


def _on_one_device(source: Memory, target: Memory) -> bool:
    """Pages and their node's memory, or twice the same pages."""
    tiers = (source.tier, target.tier)
    return source.node == target.node and Tier.HBM in tiers and (source is target or tiers != (Tier.HBM, Tier.HBM))


class ReplayTransport:
    """Answers its n-th batch with the n-th logged results; moves nothing."""

    pacing: Pacing | None = None

    def __init__(self, name: str, reaches: Callable[[Memory, Memory], bool], log: Log):
        self.name = name
        self._reaches = reaches
        self._log = log
        self._calls = 0
        self._stats = TransportStats()

    def register(self, memory: Memory) -> None:
        pass

    def deregister(self, memory: Memory) -> None:
        pass

    def reaches(self, source: Memory, target: Memory) -> bool:
        return self._reaches(source, target)

    def stats(self) -> TransportStats:
        return self._stats

    def submit(self, copies: list[Copy], priority: int = 0) -> FutureHandle:
        handle = FutureHandle(aio.new_future())
        found = self._log.answer(self.name, self._calls)
        self._calls += 1
        self._stats.pending_bytes += sum(copy.source.nbytes for copy in copies)
        if found is not None:
            aio.clock().call_at_ns(found[0], self._deliver, copies, found[1], handle)
        return handle

    def _deliver(self, copies: list[Copy], payload: dict[str, Any], handle: FutureHandle) -> None:
        results = decode_results(payload, copies)
        for copy, result in zip(copies, results, strict=True):
            self._stats.pending_bytes -= copy.source.nbytes
            if result.error is None:
                self._stats.bytes_moved += copy.source.nbytes
        if not handle.future.done():
            handle.future.set_result(results)


class ReplayRails(ReplayTransport):
    """One between processes: each receiving node has a path of its own."""

    def rails(self, source: Memory, target: Memory) -> Sequence[Rail]:
        return (Rail(remote=target.node),)

    def submit(self, copies: list[Copy], priority: int = 0, rail: Rail | None = None) -> FutureHandle:
        return super().submit(copies, priority)


class ReplaySsdStore(NullStore):
    """Sizes only, and what the real one held when it was opened."""

    def __init__(self, node: str, capacity: int, packer: Packer, lossy: bool, found: Sequence[Stored]):
        super().__init__(node, Tier.SSD, capacity, packer.packed_bytes, packer=packer)
        self.lossy = lossy
        self._found = found
        self._headers.update({stored.slot: (stored.block, stored.checksum) for stored in found})
        self._free = [slot for slot in self._free if slot not in self._headers]

    def recovered(self) -> Sequence[Stored]:
        found, self._found = self._found, ()
        return found


@dataclass(slots=True)
class ReplayPacker:
    """Says what the real one did; what it would make of bytes nobody asks."""

    name: str
    lossy: bool
    packed_bytes: int
    block_bytes: int

    def pack(self, block: NDArray[np.uint8]) -> NDArray[np.uint8]:
        raise AssertionError("a replay has no bytes")

    def unpack(self, packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
        raise AssertionError("a replay has no bytes")


@dataclass(frozen=True, slots=True)
class Shape:
    """What the real world's mechanisms looked like (its own outcome, `world`)."""

    fingerprint: str
    bytes_per_token: int
    page_tokens: int
    pages: int
    pool_blocks: int
    max_batch: int
    chunk_tokens: int
    max_context_tokens: int
    shares_decoded: bool
    between: str = "local"
    """The transport between the host memories of two nodes."""
    ssd_blocks: int = 0
    """Of each node's SSD; 0 where there is none."""
    packers: Sequence[Mapping[str, Any]] = ()
    """How blocks rest in host memory and on SSD; as computed where nothing is said."""
    groups: Sequence[Mapping[str, Any]] = ()
    """The KV groups; one of full attention where nothing is said, as in logs of earlier versions."""

    @property
    def block_bytes(self) -> int:
        """Of a block as it was computed."""
        return self.bytes_per_token * self.page_tokens

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return tuple(KVGroup(**group) for group in self.groups) or (KVGroup(bytes_per_token=self.bytes_per_token),)

    def packer(self, tier: Tier) -> Packer:
        at = 0 if tier is Tier.DRAM else 1
        if at >= len(self.packers):
            return AsComputed(self.block_bytes)
        return ReplayPacker(**self.packers[at], block_bytes=self.block_bytes)


class ReplayWorld:
    """Stands in for the world of a logged run."""

    name = "replay"
    virtual = True
    keeps_tokens = True

    def __init__(self, log: Log, recorder: Recorder, table: KeyTable):
        self.log = log
        self._recorder = recorder
        self._table = table
        self._ssd_stores: dict[str, ReplaySsdStore] = {}
        self._watchers: dict[str, Watcher] = {}
        self._dead: dict[str, None] = {}
        self._shape = Shape(**log.setting("world"))
        self.shares_decoded = self._shape.shares_decoded
        self._cost = Padded(**log.setting("calibration"))
        self._link = log.setting("link")
        measured = log.answer("ssd", 0)
        self._ssd = None if measured is None else measured[1]
        self._transports: list[Transport] = [
            ReplayTransport("device", _on_one_device, log),
            *self._between_nodes(log),
        ]
        if self._shape.ssd_blocks:
            self._transports.append(ReplayTransport("file", lambda a, b: Tier.SSD in (a.tier, b.tier), log))

    def _between_nodes(self, log: Log) -> list[Transport]:
        """Between the hosts of nodes, by copies that the engine cuts as it did; in one process also from device to
        device."""
        kind = ReplayTransport if self._shape.between == "local" else ReplayRails
        between = kind(self._shape.between, lambda a, b: a.tier is Tier.DRAM is b.tier, log)
        between.pacing = PACING
        if kind is ReplayRails:
            return [between]
        return [between, ReplayTransport("mesh", lambda a, b: a is not b and a.tier is Tier.HBM is b.tier, log)]

    def run(self, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return VirtualLoop().run(main)

    def devices(self) -> list[str]:
        return ["a log"]

    def kv_format(self) -> KVFormat:
        shape = self._shape
        return KVFormat(shape.fingerprint, shape.page_tokens, shape.kv_groups)

    def cost(self) -> CostModel:
        return self._cost

    def link(self) -> tuple[float, float]:
        return self._link["bytes_per_s"], self._link["latency_s"]

    def ssd(self) -> tuple[float, float] | None:
        return None if self._ssd is None else (self._ssd["bytes_per_s"], self._ssd["latency_s"])

    async def prepare(self, instances: list[tuple[str, Role]], report: Callable[[str, float], None]) -> None:
        """What was on disk is there; what came of itself comes again: programs that were compiled in mid-run left an
        event each, which no procedure makes; processes have gone, and others have come."""
        for name, _ in instances:
            self.ssd_store(node_of(name))
        for time_ns, late in self._all("compile"):
            aio.clock().call_at_ns(time_ns, self._compiled, time_ns, late["place"], late["what"])
        for time_ns, death in self._all("death"):
            aio.clock().call_at_ns(time_ns, self._died, death["instance"])
        for time_ns, replacement in self._all("replacement"):
            aio.clock().call_at_ns(time_ns, self._replaced, replacement["instance"], replacement["by"])

    def _all(self, mechanism: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """What came of itself, in order: `(time_ns, payload)`."""
        for call in itertools.count():
            found = self.log.answer(mechanism, call)
            if found is None:
                return
            yield found

    def _died(self, instance: str) -> None:
        """An instance's process has gone."""
        self._dead[instance] = None
        watcher = self._watchers.get(instance)
        if watcher is not None:
            watcher.died()

    def _replaced(self, instance: str, by: str) -> None:
        """Another one takes its place."""
        self._watchers[instance].replaced(by)

    def _watch(self, instance: str, watcher: Watcher) -> None:
        self._watchers[instance] = watcher
        if instance in self._dead:
            watcher.died()

    def _compiled(self, time_ns: int, place: str, what: str) -> None:
        self._recorder.event(time_ns, "compile", -1, place, detail=what)

    def instance(self, name: str, node: str, role: Role) -> InstanceParts:
        shape = self._shape
        block_bytes = shape.bytes_per_token * shape.page_tokens
        capacity = Capacity(
            shape.pages, shape.page_tokens, block_bytes, shape.max_batch, shape.chunk_tokens, shape.max_context_tokens
        )
        pages = NullStore(node, Tier.HBM, shape.pages, block_bytes, f"{name}.hbm")
        return InstanceParts(ReplayExecutor(name, capacity, self.log), pages, partial(self._watch, name))

    def pool_store(self, node: str) -> NullStore:
        packer = self._shape.packer(Tier.DRAM)
        return NullStore(node, Tier.DRAM, self._shape.pool_blocks, packer.packed_bytes, packer=packer)

    def ssd_store(self, node: str) -> NullStore | None:
        shape = self._shape
        if not shape.ssd_blocks:
            return None
        if node not in self._ssd_stores:
            found = decode_recovered(self.log.setting(mechanism(node)), self._table)
            packer = shape.packer(Tier.SSD)
            lossy = packer.lossy or shape.packer(Tier.DRAM).lossy
            self._ssd_stores[node] = ReplaySsdStore(node, shape.ssd_blocks, packer, lossy, found)
        return self._ssd_stores[node]

    def transports(self) -> list[Transport]:
        return self._transports

    async def remove(self, instance: str) -> None:
        pass

    def figures(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        pass
