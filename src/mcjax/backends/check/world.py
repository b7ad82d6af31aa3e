"""The checking world: byte-true blocks, virtual time, seeded disorder. It answers whether every token is right."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from mcjax.backends.check.digests import ENTRY_BYTES
from mcjax.backends.check.executor import STEP_S, TOKEN_S, CheckExecutor
from mcjax.backends.check.faults import FaultCounts, Faults
from mcjax.backends.check.network import CheckNetwork
from mcjax.backends.check.store import ByteStore, DiskStore
from mcjax.backends.check.transport import LATENCY_S, CheckTransport
from mcjax.backends.virtual import VirtualLoop
from mcjax.cost.base import CostModel
from mcjax.cost.fitted import Fitted
from mcjax.engine.base import Capacity, InstanceParts
from mcjax.transfer.base import Transport
from mcjax.types import KVFormat, KVGroup, Role, Scripts, Tier

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How big everything is; small, so that pools overflow and pages run out."""

    block_tokens: int = 4
    pages: int = 48
    pool_blocks: int = 64
    ssd_blocks: int | None = None
    max_batch: int = 4
    chunk_tokens: int = 12
    max_context_tokens: int = 160
    nics: int = 1
    """Of each node; several are told apart."""


class CheckWorld:
    """Every mechanism holds and moves real bytes."""

    name = "check"
    virtual = True
    keeps_tokens = True
    shares_decoded = True

    def __init__(self, sizes: Sizes, scripts: Scripts, faults: Faults, rng: np.random.Generator):
        self.counts = FaultCounts()
        self.loop = VirtualLoop()
        self._sizes = sizes
        self.executors: dict[str, CheckExecutor] = {}
        """By the instances' names."""
        self._scripts = scripts
        self._faults = faults
        self._rng = rng
        self._format = KVFormat("digests", sizes.block_tokens, (KVGroup(bytes_per_token=ENTRY_BYTES),))
        self.disks: dict[str, DiskStore] = {}
        """By the nodes' names; those of the dead until a node that joins has taken over what they left."""
        self.outages_ns: dict[str, int] = {}
        """Until when a node's SSD refuses everything."""
        self.network = CheckNetwork(sizes.nics, faults, self.counts, rng) if sizes.nics > 1 else None
        """Where nodes have several NICs."""
        self._transports: list[Transport] = [
            CheckTransport("device", lambda a, b: a.node == b.node, faults, self.counts, rng, self.outages_ns),
            self.network or CheckTransport("network", lambda a, b: a.node != b.node, faults, self.counts, rng),
        ]

    def run(self, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return self.loop.run(main)

    def devices(self) -> list[str]:
        return ["digests"]

    def kv_format(self) -> KVFormat:
        return self._format

    def cost(self) -> CostModel:
        step_s = sum(STEP_S) / 2
        token_s = TOKEN_S + step_s / self._sizes.chunk_tokens
        return Fitted("check", round(token_s * 1e12), 0, round(step_s * 1e9), round(TOKEN_S * 1e9), 0)

    def link(self) -> tuple[float, float]:
        return 1e6, sum(LATENCY_S) / 2

    def ssd(self) -> tuple[float, float] | None:
        return None if self._sizes.ssd_blocks is None else self.link()

    async def prepare(self, instances: list[tuple[str, Role]], report: Callable[[str, float], None]) -> None:
        pass

    def instance(self, name: str, node: str, role: Role) -> InstanceParts:
        sizes = self._sizes
        page_bytes = self._format.block_bytes
        capacity = Capacity(
            sizes.pages, sizes.block_tokens, page_bytes, sizes.max_batch, sizes.chunk_tokens, sizes.max_context_tokens
        )
        pages = ByteStore(node, Tier.HBM, sizes.pages, page_bytes, f"{name}.hbm")
        executor = CheckExecutor(name, capacity, pages, self._scripts, self._rng, self._faults, self.counts)
        self.executors[name] = executor
        return InstanceParts(executor, pages)

    def pool_store(self, node: str) -> ByteStore:
        return ByteStore(node, Tier.DRAM, self._sizes.pool_blocks, self._format.block_bytes)

    def ssd_store(self, node: str) -> DiskStore | None:
        """A node that joins after another has died is given that one's disk."""
        if self._sizes.ssd_blocks is None:
            return None
        dead = next((name for name, disk in self.disks.items() if disk.left is not None), None)
        found = None if dead is None else self.disks.pop(dead).left
        disk = self.disks[node] = DiskStore(node, self._sizes.ssd_blocks, self._format.block_bytes, found)
        return disk

    def transports(self) -> list[Transport]:
        return self._transports

    async def remove(self, instance: str) -> None:
        pass

    def figures(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        pass
