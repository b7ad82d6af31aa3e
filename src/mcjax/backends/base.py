"""What a world provides. Everything above it is the same in every world."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mcjax.cost.base import CostModel
from mcjax.cost.hardware import Hardware
from mcjax.cost.model_shape import ModelShape
from mcjax.engine.base import InstanceParts
from mcjax.kernels.choice import KernelChoice
from mcjax.kvpool.base import BlockStore
from mcjax.kvpool.keys import KeyTable
from mcjax.kvpool.stores.slab import HugePages
from mcjax.transfer.base import Transport
from mcjax.transfer.topology import Topology
from mcjax.types import KVFormat, Recorder, Role, Scripts

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tiers:
    """What a node's tiers are, beside the size of its host memory."""

    ssd_bytes: int | None = None
    ssd_path: Path | None = None
    """Where a real SSD tier lies; each node has a folder of its own in it."""
    dram_encoding: str = "none"
    ssd_encoding: str = "none"
    huge_pages: HugePages = "auto"
    """What host memory is made of, where it is real."""
    numa_node: int | None = None
    """Where real host memory lies; None leaves that to the system."""


@dataclass(slots=True)
class WorldInputs:
    """What every world is made from, beside the options of its own config."""

    model: ModelShape
    hardware: Hardware
    cost: CostModel
    scripts: Scripts
    block_tokens: int
    pool_bytes: int | None
    seed: int
    recorder: Recorder
    roles: Sequence[Role]
    """Of every instance in the order in which they come, those that join in mid-run last."""
    uncached_tokens: Callable[[], Sequence[int]]
    """Of a sample of the workload's prompts: tokens to compute when what earlier ones computed is there still. Costs
    something, so it is asked for where it matters."""
    kernels: KernelChoice = field(default_factory=KernelChoice)
    tiers: Tiers = Tiers()
    table: KeyTable = field(default_factory=KeyTable)
    """The run's names of blocks: what lies on a disk is known by keys."""
    topology: Topology | None = None
    """Of the nodes' NICs, where they are told apart."""


class World(Protocol):
    """A world makes mechanisms and turns the loop. Parts are made before or during the run, never shared."""

    name: str
    virtual: bool
    """True when time is virtual, so that a run is a function of its config."""
    keeps_tokens: bool
    """True when output token ids exist."""
    shares_decoded: bool
    """True when a block that decode filled may be matched by other requests: its bits do not depend on who made it."""

    def run(self, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `main` to its end on this world's loop. Called once."""
        ...

    def devices(self) -> list[str]:
        """What it computes on, for the record."""
        ...

    def kv_format(self) -> KVFormat: ...

    def link(self) -> tuple[float, float]:
        """What estimates assume of a node's network: bytes a second, and latency in seconds."""
        ...

    def ssd(self) -> tuple[float, float] | None:
        """The same of a node's SSD, counted in bytes of blocks as they are in host memory. None: nodes have no SSD
        tier."""
        ...

    def cost(self) -> CostModel:
        """The cost model that estimates are made with. Available once `prepare` is done."""
        ...

    async def prepare(self, instances: list[tuple[str, Role]], report: Callable[[str, float], None]) -> None:
        """Load weights, compile, measure; `report(what, share_done)` shows progress.

        `instances` are all that will be there, those that join in mid-run too.
        """
        ...

    def instance(self, name: str, node: str, role: Role) -> InstanceParts: ...

    def pool_store(self, node: str) -> BlockStore:
        """The DRAM store of a node."""
        ...

    def ssd_store(self, node: str) -> BlockStore | None:
        """The SSD store of a node, if it has one."""
        ...

    def transports(self) -> list[Transport]:
        """The ways to move bytes in this world, in order of preference."""
        ...

    async def remove(self, instance: str) -> None:
        """The instance has left: free what it held."""
        ...

    def figures(self) -> Mapping[str, Any]:
        """What only this world knows of a run, for the run's summary. Asked when all is over."""
        ...

    async def close(self) -> None: ...
