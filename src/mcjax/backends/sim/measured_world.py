"""The simulated world of a measured machine: its engine's sizes, its threads, and what they do to each other."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import numpy as np

from mcjax import aio
from mcjax.backends.base import WorldInputs
from mcjax.backends.sim.host import Host, HostThread, Job
from mcjax.backends.sim.host_executor import HostExecutor
from mcjax.backends.sim.transport import SimTransport
from mcjax.backends.virtual import VirtualLoop
from mcjax.cost.base import CostModel
from mcjax.cost.measured import Line, Measured
from mcjax.cost.noisy import perturbed
from mcjax.engine.base import Capacity, InstanceParts
from mcjax.errors import ConfigError
from mcjax.kvpool.stores.null import NullStore
from mcjax.transfer.base import Memory, Transport
from mcjax.types import NS_PER_S, KVFormat, Role, Tier

T = TypeVar("T")

LOCAL = "local"
"""The thread that copies between host memories."""

COPY = "copy"
"""The kind of work that a copy is on its host."""


class MeasuredWorld:
    """All instances on one host, each with a thread of its own; a node is memory.

    Sizes are those of the engine that was measured, whatever `chunk_tokens`, `max_batch` and `memory_share` say.
    """

    name = "sim"
    virtual = True
    keeps_tokens = True

    def __init__(self, inputs: WorldInputs, cost: Measured, noise: float = 0.0):
        machine, sizes = cost.machine, cost.machine.sizes
        if inputs.block_tokens != sizes.page_tokens:
            problem = f"cost={cost.name} was measured with blocks of {sizes.page_tokens} tokens"
            raise ConfigError("kvpool.block_tokens", inputs.block_tokens, problem, [sizes.page_tokens])
        for key in ("dram_encoding", "ssd_encoding"):
            encoding = getattr(inputs.tiers, key)
            if encoding != "none":
                problem = f"cost={cost.name} was measured without: nobody knows what converting takes there"
                raise ConfigError(f"kvpool.{key}", encoding, problem, ["none"])
        self._cost, self._machine = cost, machine
        self._scripts = inputs.scripts
        self._noise, self._seed = noise, inputs.seed
        self._format = inputs.model.kv_format(sizes.page_tokens, fingerprint=inputs.model.name)
        self._pool_blocks = sizes.pool_blocks
        if inputs.pool_bytes is not None:
            self._pool_blocks = max(1, int(inputs.pool_bytes) // self._format.block_bytes)
        self.shares_decoded = sizes.shares_decoded
        self._host = Host(machine.slowdown, inputs.seed)
        self._threads = Threads(self._format.block_bytes, machine.overheads.copy_ns)
        copies = machine.copies
        self._threads.add(LOCAL, HostThread(self._host), {LOCAL: copies.between_hosts})
        self._transports: list[Transport] = [
            SimTransport(self._threads, device_thread, "device", beside_device),
            SimTransport(self._threads, local_thread, "local", between_hosts),
        ]
        self._made = 0

    def run(self, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return VirtualLoop().run(main)

    def devices(self) -> list[str]:
        return [f"{self._machine.hardware}, as measured"]

    def kv_format(self) -> KVFormat:
        return self._format

    def cost(self) -> CostModel:
        return self._cost

    def link(self) -> tuple[float, float]:
        line = self._machine.copies.between_hosts
        return self._format.block_bytes * NS_PER_S / max(1, line.each_ns), line.fixed_ns / NS_PER_S

    def ssd(self) -> tuple[float, float] | None:
        return None

    async def prepare(self, instances: list[tuple[str, Role]], report: Callable[[str, float], None]) -> None:
        pass

    def instance(self, name: str, node: str, role: Role) -> InstanceParts:
        sizes, copies = self._machine.sizes, self._machine.copies
        thread = HostThread(self._host)
        pages = NullStore(node, Tier.HBM, sizes.pages, self._format.block_bytes, f"{name}.hbm")
        self._threads.add(pages.name, thread, {"off": copies.off_device, "onto": copies.onto_device})
        capacity = Capacity(
            pages=sizes.pages,
            page_tokens=sizes.page_tokens,
            page_bytes=self._format.block_bytes,
            max_batch=sizes.max_batch,
            chunk_tokens=sizes.chunk_tokens,
            max_context_tokens=sizes.max_context_tokens,
        )
        cost = perturbed(self._cost, self._noise, self._seed + self._made)
        rng = np.random.default_rng([self._seed, self._made])
        self._made += 1
        executor = HostExecutor(name, capacity, cost, self._scripts, self._host, thread, self._machine, rng)
        return InstanceParts(executor, pages)

    def pool_store(self, node: str) -> NullStore:
        return NullStore(node, Tier.DRAM, self._pool_blocks, self._format.block_bytes)

    def ssd_store(self, node: str) -> None:
        return None

    def transports(self) -> list[Transport]:
        return self._transports

    async def remove(self, instance: str) -> None:
        pass

    def figures(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        pass


def device_thread(source: Memory, target: Memory) -> tuple[str, ...]:
    """The thread of the device that a copy leaves or reaches, and which it does."""
    return (source.name, "off") if source.tier is Tier.HBM else (target.name, "onto")


def local_thread(source: Memory, target: Memory) -> tuple[str, ...]:
    return (LOCAL, LOCAL)


def beside_device(source: Memory, target: Memory) -> bool:
    """What the `device` transport reaches: one side on a device, the other in its node's host memory."""
    return source.node == target.node and (source.tier is Tier.HBM) != (target.tier is Tier.HBM)


def between_hosts(source: Memory, target: Memory) -> bool:
    """What the `local` transport reaches: host memories, of any nodes, since all are of one machine."""
    return source.tier is Tier.DRAM and target.tier is Tier.DRAM


class Threaded:
    """A copy that waits for its thread, or occupies it."""

    __slots__ = ("nbytes", "on_arrival")

    def __init__(self, nbytes: int, on_arrival: Callable[[Threaded], object]):
        self.nbytes = nbytes
        self.on_arrival: Callable[[Threaded], object] | None = on_arrival

    def cancel(self) -> None:
        """Nobody is told; the thread spends its time on it all the same."""
        self.on_arrival = None

    def ended(self) -> None:
        told, self.on_arrival = self.on_arrival, None
        if told is not None:
            told(self)


class Threads:
    """A `transport.Carrier`: copies are jobs of named threads, and take what such copies were measured to take."""

    def __init__(self, block_bytes: int, hand_off_ns: int):
        self._block_bytes = block_bytes
        self._hand_off_ns = hand_off_ns
        self._threads: dict[str, tuple[HostThread, dict[str, Line]]] = {}

    def add(self, name: str, thread: HostThread, lines: dict[str, Line]) -> None:
        """Make a thread known, and what the ways lead over it that it knows by name."""
        self._threads[name] = (thread, lines)

    def start(
        self, nbytes: int, links: tuple[str, ...], on_arrival: Callable[[Threaded], object], priority: int = 0
    ) -> Threaded:
        """First come, first served: priorities are the transfer engine's business."""
        name, way = links
        thread, lines = self._threads[name]
        copy = Threaded(nbytes, on_arrival)
        duration_ns = lines[way].at(nbytes // self._block_bytes)
        job = Job(COPY, duration_ns, copy.ended)
        aio.clock().call_at_ns(aio.now_ns() + self._hand_off_ns, thread.submit, job)
        return copy
