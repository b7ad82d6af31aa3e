"""The simulated network between nodes whose NICs are told apart: a link each way for a NIC, a spine between switches.

A NIC can be taken down in mid-run, and brought back: what crosses it then fails, and what comes later is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from mcjax.backends.sim.links import LinkModel
from mcjax.backends.sim.transport import SPINE, SimBatch, SimTransport, carried_bytes, network_route, other_node
from mcjax.cost.hardware import Hardware
from mcjax.errors import PeerLost
from mcjax.transfer.base import Copy, Memory, Rail
from mcjax.transfer.topology import Topology
from mcjax.types import Tier


def add_nics(links: LinkModel, node: str, topology: Topology, hardware: Hardware) -> None:
    """The links of a node's NICs, out and in."""
    for nic in topology.nics:
        links.add(f"out:{node}/{nic.name}", nic.bytes_per_s, hardware.nic_latency_ns)
        links.add(f"in:{node}/{nic.name}", nic.bytes_per_s)


class RailBatch(SimBatch):
    """A batch that its network knows for as long as it is under way."""

    def __init__(self, network: SimNetwork, copies: list[Copy], rail: Rail):
        super().__init__(network, copies)
        self.rail = rail
        self._network = network

    def end(self, index: int, nbytes: int, problem: Exception | None) -> None:
        super().end(index, nbytes, problem)  # pyright: ignore[reportArgumentType]
        if not self._open:
            self._network.under_way.pop(self, None)


class SimNetwork(SimTransport):
    """Between nodes, by the rails of a topology. Copies share links fairly, and classes are strict, as on all links."""

    def __init__(self, links: LinkModel, topology: Topology, has_spine: bool):
        super().__init__(links, network_route, "network", other_node)
        self.under_way: dict[RailBatch, None] = {}
        self._topology = topology
        self._has_spine = has_spine
        self._down: dict[str, None] = {}

    def rails(self, source: Memory, target: Memory) -> Sequence[Rail]:
        return self._topology.rails(
            source.node,
            target.node,
            getattr(source, "numa_node", None),
            getattr(target, "numa_node", None),
        )

    def submit(self, copies: list[Copy], priority: int = 0, rail: Rail | None = None) -> RailBatch:
        """Start every copy now, on `rail`; None: on the first there is."""
        first = copies[0]
        rail = rail or self.rails(first.source.memory, first.target.memory)[0]
        batch = RailBatch(self, copies, rail)
        self.under_way[batch] = None
        for index, copy in enumerate(copies):
            problem = self._refusal(copy, rail) or self.problem(copy)
            if problem is not None:
                batch.end(index, 0, problem)
                continue
            nbytes = carried_bytes(copy)
            self.counted.pending_bytes += nbytes
            batch.flows[self._links.start(nbytes, self._crossed(copy, rail), batch.arrived, priority)] = index
        return batch

    def set_down(self, nic: str, is_down: bool) -> None:
        """Take a NIC (`node/nic0`) down, with all that is crossing it, or bring it back."""
        if not is_down:
            self._down.pop(nic, None)
            return
        self._down[nic] = None
        for batch in [batch for batch in self.under_way if nic in (batch.rail.local, batch.rail.remote)]:
            batch.cancel()

    def _refusal(self, copy: Copy, rail: Rail) -> PeerLost | None:
        for nic in (rail.local, rail.remote):
            if nic in self._down:
                return PeerLost(f"{self.name}: {nic} is down", copy.request_id, copy.first_block)
        return None

    def _crossed(self, copy: Copy, rail: Rail) -> tuple[str, ...]:
        source, target = copy.source.memory, copy.target.memory
        return (
            *((f"ssd:{source.node}",) if source.tier is Tier.SSD else ()),
            f"out:{rail.local}",
            f"in:{rail.remote}",
            *((f"ssd:{target.node}",) if target.tier is Tier.SSD else ()),
            *((SPINE,) if rail.crosses and self._has_spine else ()),
        )
