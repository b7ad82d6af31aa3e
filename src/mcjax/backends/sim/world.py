"""The simulated world: sizes instead of bytes, costs instead of compute, virtual time. It never imports jax."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from mcjax.backends.at_rest import at_rest
from mcjax.backends.base import Tiers, WorldInputs
from mcjax.backends.sim.executor import SimExecutor
from mcjax.backends.sim.links import LinkModel
from mcjax.backends.sim.measured_world import MeasuredWorld
from mcjax.backends.sim.network import SimNetwork, add_nics
from mcjax.backends.sim.transport import (
    SPINE,
    SimTransport,
    device_route,
    network_route,
    other_node,
    same_node,
    spine_route,
)
from mcjax.backends.virtual import VirtualLoop
from mcjax.cost.base import CostModel
from mcjax.cost.hardware import Hardware
from mcjax.cost.measured import Measured
from mcjax.cost.memory import kv_capacity_tokens
from mcjax.cost.model_shape import ModelShape
from mcjax.cost.noisy import perturbed
from mcjax.engine.base import Capacity, InstanceParts
from mcjax.errors import ConfigError
from mcjax.kvpool.stores.null import NullStore
from mcjax.transfer.base import Transport
from mcjax.transfer.topology import Topology
from mcjax.types import NS_PER_S, KVFormat, Role, Scripts, Tier

T = TypeVar("T")


class SimWorld:
    """Equal instances of one hardware, each on a node of its own.

    Args:
        chunk_tokens: most prompt tokens in one step.
        max_batch: most sequences in one decode step.
        memory_share: share of device memory used for weights, activations and KV.
        pool_bytes: DRAM of a node's pool; None takes the hardware's.
        noise: spread (sigma of a log-normal factor) of what steps really take about what estimates expect.
        seed: of the noise; every instance has its own.
        ssd_bytes: of a node's pool, below its DRAM; None: none.
        encodings: how blocks rest in DRAM, and on SSD.
        spine_bytes_per_s: what all nodes together can send to each other (where NICs are told apart: from switch to
            switch); None takes a spine that never blocks.
        topology: tells NICs apart; None: a node's are one.
    """

    name = "sim"
    virtual = True
    keeps_tokens = True
    shares_decoded = True

    def __init__(
        self,
        model: ModelShape,
        hardware: Hardware,
        cost: CostModel,
        scripts: Scripts,
        block_tokens: int,
        chunk_tokens: int = 8192,
        max_batch: int = 256,
        memory_share: float = 0.9,
        pool_bytes: int | None = None,
        noise: float = 0.0,
        seed: int = 0,
        spine_bytes_per_s: float | None = None,
        ssd_bytes: int | None = None,
        encodings: tuple[str, str] = ("none", "none"),
        topology: Topology | None = None,
    ):
        self.links = LinkModel()
        if spine_bytes_per_s is not None:
            if not 0 < spine_bytes_per_s < math.inf:
                problem = "must be positive and finite, or null for no bound"
                raise ConfigError("backend.spine_bytes_per_s", spine_bytes_per_s, problem)
            self.links.add(SPINE, spine_bytes_per_s)
        self._model = model
        self._hardware = hardware
        self._cost = cost
        self._scripts = scripts
        self._format = model.kv_format(block_tokens, fingerprint=model.name)
        capacity_tokens = kv_capacity_tokens(model, hardware, memory_share)
        self._capacity = Capacity(
            pages=capacity_tokens // block_tokens,
            page_tokens=block_tokens,
            page_bytes=self._format.block_bytes,
            max_batch=max_batch,
            chunk_tokens=chunk_tokens,
            max_context_tokens=capacity_tokens,
        )
        self._at_rest = rest = at_rest(
            Tiers(dram_encoding=encodings[0], ssd_encoding=encodings[1]), model, self._format
        )
        dram_bytes = int(hardware.host_dram_bytes if pool_bytes is None else pool_bytes)
        self._pool_blocks = dram_bytes // rest.dram.packed_bytes
        if self._pool_blocks < 1:
            raise ConfigError("kvpool.dram_bytes", pool_bytes, f"less than one block of {rest.dram.packed_bytes} bytes")
        self._ssd_blocks = None if ssd_bytes is None else int(ssd_bytes) // rest.ssd.packed_bytes
        if self._ssd_blocks is not None and not hardware.ssd_bytes_per_s:
            raise ConfigError("kvpool.ssd_bytes", ssd_bytes, f"hardware={hardware.name} has no SSD", ["null"])
        self._topology = topology
        between_nodes = network_route if spine_bytes_per_s is None else spine_route
        self.network = (
            SimTransport(self.links, between_nodes, "network", other_node)
            if topology is None
            else SimNetwork(self.links, topology, spine_bytes_per_s is not None)
        )
        self._transports: list[Transport] = [
            SimTransport(self.links, device_route, "device", same_node),
            self.network,
        ]
        self._noise, self._seed = noise, seed
        self._made = 0
        self._nodes: dict[str, None] = {}

    def run(self, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return VirtualLoop().run(main)

    def devices(self) -> list[str]:
        return [f"{self._hardware.name}, simulated"]

    def kv_format(self) -> KVFormat:
        return self._format

    def cost(self) -> CostModel:
        return self._cost

    def link(self) -> tuple[float, float]:
        return float(self._hardware.nic_bytes_per_s), self._hardware.nic_latency_ns / NS_PER_S

    def ssd(self) -> tuple[float, float] | None:
        if self._ssd_blocks is None:
            return None
        return float(self._hardware.ssd_bytes_per_s), self._hardware.ssd_latency_ns / NS_PER_S

    async def prepare(self, instances: list[tuple[str, Role]], report: Callable[[str, float], None]) -> None:
        pass

    def instance(self, name: str, node: str, role: Role) -> InstanceParts:
        cost = perturbed(self._cost, self._noise, self._seed + self._made)
        self._made += 1
        executor = SimExecutor(name, self._capacity, cost, self._scripts)
        pages = NullStore(node, Tier.HBM, self._capacity.pages, self._capacity.page_bytes, f"{name}.hbm")
        pages.layout = self._at_rest.computed
        self.links.add(f"hbm:{pages.name}", self._hardware.hbm_bytes_per_s / 2)  # each byte is read, and written
        return InstanceParts(executor, pages)

    def pool_store(self, node: str) -> NullStore:
        hardware = self._hardware
        if node not in self._nodes:
            self._nodes[node] = None
            self.links.add(f"pcie:{node}", hardware.pcie_bytes_per_s, hardware.pcie_latency_ns)
            if self._topology is not None:
                add_nics(self.links, node, self._topology, hardware)
            else:
                self.links.add(f"out:{node}", hardware.nic_bytes_per_s, hardware.nic_latency_ns)
                self.links.add(f"in:{node}", hardware.nic_bytes_per_s)
            if hardware.ssd_bytes_per_s:
                self.links.add(f"ssd:{node}", hardware.ssd_bytes_per_s, hardware.ssd_latency_ns)
        dram = self._at_rest.dram
        store = NullStore(node, Tier.DRAM, self._pool_blocks, dram.packed_bytes, packer=dram)
        store.layout = self._at_rest.layout(dram)
        return store

    def ssd_store(self, node: str) -> NullStore | None:
        if self._ssd_blocks is None:
            return None
        store = NullStore(node, Tier.SSD, self._ssd_blocks, self._at_rest.ssd.packed_bytes, packer=self._at_rest.ssd)
        store.lossy = self._at_rest.ssd_lossy
        store.layout = self._at_rest.layout(self._at_rest.ssd)
        return store

    def transports(self) -> list[Transport]:
        return self._transports

    async def remove(self, instance: str) -> None:
        pass

    def figures(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        pass


def make_world(
    inputs: WorldInputs,
    chunk_tokens: int,
    max_batch: int,
    memory_share: float,
    noise: float,
    spine_bytes_per_s: float | None,
) -> SimWorld | MeasuredWorld:
    """The simulated world of a run's config (`conf/backend/sim.yaml`); a measured cost brings its machine's sizes."""
    if isinstance(inputs.cost, Measured):
        if spine_bytes_per_s is not None:
            problem = "a measured machine has no network between its nodes"
            raise ConfigError("backend.spine_bytes_per_s", spine_bytes_per_s, problem, ["null"])
        if inputs.topology is not None:
            problem = "a measured machine has no NICs between its nodes"
            raise ConfigError("transfer.topology", "given", problem, ["null"])
        return MeasuredWorld(inputs, inputs.cost, noise)
    return SimWorld(
        inputs.model,
        inputs.hardware,
        inputs.cost,
        inputs.scripts,
        inputs.block_tokens,
        chunk_tokens,
        max_batch,
        memory_share,
        inputs.pool_bytes,
        noise,
        inputs.seed,
        spine_bytes_per_s,
        inputs.tiers.ssd_bytes,
        (inputs.tiers.dram_encoding, inputs.tiers.ssd_encoding),
        inputs.topology,
    )
