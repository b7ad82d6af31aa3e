"""Where NICs are: on which NUMA node of their host, and on which switch. Plain data, and the rails that follow from it.

Every node is built alike; what differs is the switch domain (a rack's leaf switch) that a node is in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

from mcjax.cost.hardware import Hardware
from mcjax.errors import ConfigError
from mcjax.transfer.base import Rail

Switches = Literal["domain", "rail"]

KEY = "transfer.topology"
WORDS: Mapping[str, Mapping[str, object]] = {"nics": {}, "rails": {"switches": "rail"}}
"""What may be said in a word, and what it is short for."""


@dataclass(frozen=True, slots=True)
class Nic:
    """A network card, as every node has one."""

    name: str
    numa_node: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Topology:
    """What every node's NICs are, and which of them are one switch apart."""

    nics: tuple[Nic, ...]
    switches: Switches = "domain"
    """`domain`: all NICs of a domain on one switch; `rail`: the NICs of a number on one (rail-optimised), within a
    domain."""
    domains: Mapping[str, str] = field(default_factory=dict[str, str])
    """By node; who is not named is in a domain with all others that are not."""

    def switch(self, node: str, nic: int) -> tuple[str, int]:
        """The switch that a node's NIC is on."""
        return self.domains.get(node, ""), nic if self.switches == "rail" else 0

    def distance(self, nic: int, numa_node: int | None) -> int:
        """0 from a NIC's own NUMA node, and from memory that lies on all of them (None); 1 from another."""
        return 0 if numa_node is None else int(self.nics[nic].numa_node != numa_node)

    def rails(
        self, source: str, target: str, source_numa: int | None = None, target_numa: int | None = None
    ) -> tuple[Rail, ...]:
        """Ways from node to node: each NIC with a partner of its own, so that rails share nothing, then all other
        pairs, as spares.

        Partners are NICs of the same number; without rail switches, those that are equally near to their memories.
        """
        count = range(len(self.nics))
        leaving, entering = list(count), list(count)
        if self.switches == "domain":
            leaving.sort(key=lambda nic: self.distance(nic, source_numa))
            entering.sort(key=lambda nic: self.distance(nic, target_numa))
        partner = dict(zip(leaving, entering, strict=True))
        pairs = [(nic, partner[nic]) for nic in count]
        pairs += [(nic, other) for nic in count for other in count if other != partner[nic]]
        return tuple(
            Rail(
                f"{source}/{self.nics[nic].name}",
                f"{target}/{self.nics[other].name}",
                self.distance(nic, source_numa) + self.distance(other, target_numa),
                self.switch(source, nic) != self.switch(target, other),
                min(self.nics[nic].bytes_per_s, self.nics[other].bytes_per_s),
                spare=other != partner[nic],
            )
            for nic, other in pairs
        )


def read_topology(value: object, hardware: Hardware | None = None) -> Topology | None:
    """`transfer.topology` of a config; what it does not say the hardware does (where none is given, only
    the form is looked at). None: NICs are not told apart.

    A node's bandwidth stays what the hardware has: its NICs share it equally. Raises `ConfigError`.
    """
    if value is None:
        return None
    if isinstance(value, str):
        if value not in WORDS:
            raise ConfigError(KEY, value, "is none", [*WORDS, "null", "a mapping such as {nics: 4, switches: rail}"])
        value = WORDS[value]
    if not isinstance(value, Mapping):
        raise ConfigError(KEY, value, "must be a word or a mapping", [*WORDS, "null"])
    given = cast("Mapping[str, object]", value)
    known = ("nics", "numa_nodes", "switches", "domains")
    for name in given:
        if name not in known:
            raise ConfigError(f"{KEY}.{name}", given[name], "is no part of a topology", known)
    nics = _count(given, "nics", 64 if hardware is None else hardware.nics)
    numa_nodes = _count(given, "numa_nodes", 1 if hardware is None else hardware.numa_nodes)
    if numa_nodes > nics:
        raise ConfigError(f"{KEY}.numa_nodes", numa_nodes, f"has a NUMA node without a NIC: there are {nics}")
    switches = given.get("switches", "domain")
    if switches not in ("domain", "rail"):
        raise ConfigError(f"{KEY}.switches", switches, "says no way to wire them", ["domain", "rail"])
    domains = given.get("domains", {})
    if not isinstance(domains, Mapping):
        raise ConfigError(
            f"{KEY}.domains", domains, "must be a mapping from nodes to names, such as {node-p0: a, node-d0: a}"
        )
    each = 1.0 if hardware is None else hardware.nic_bytes_per_s / nics
    cards = tuple(Nic(f"nic{index}", index * numa_nodes // nics, each) for index in range(nics))
    named = {str(node): str(domain) for node, domain in cast("Mapping[object, object]", domains).items()}
    return Topology(cards, switches, named)


def _count(given: Mapping[str, object], name: str, usual: int) -> int:
    count = given.get(name, usual)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 64:
        raise ConfigError(f"{KEY}.{name}", count, "must be a whole number, 1 to 64")
    return count
