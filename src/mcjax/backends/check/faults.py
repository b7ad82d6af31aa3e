"""What can go wrong in the checking world, how often, and a schedule of the things that happen at a time."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np

from mcjax.errors import ConfigError

TIMED = {
    "deaths": "death",
    "stale_views": "stale_view",
    "lost_pages": "lost_pages",
    "rotten": "rotten",
    "ssd_outages": "ssd_outage",
    "nic_outages": "nic_outage",
}
"""Faults that come at a time, and what one of them is called."""


@dataclass(frozen=True)
class Faults:
    """Probabilities of one copy (`lost` ... `slow`, `ssd_failed`), of one request (`cancelled`), of one heartbeat
    (`missed`), of one step (`broken`), of one plan (`raised`); and expected events in a schedule (`deaths` ...
    `nic_outages`).
    """

    lost: float = 0.0  # the copy never arrives; its transport reports an error, late
    late: float = 0.0  # the copy arrives after the engine has given it up
    duplicated: float = 0.0  # the copy arrives twice, the second time much later
    corrupted: float = 0.0  # a byte is flipped on the way into a host's memory
    slow: float = 0.0  # the copy takes a hundred times as long
    ssd_failed: float = 0.0  # a copy to or from an SSD ends in an error of the device
    cancelled: float = 0.0  # the client goes away at a random moment
    missed: float = 0.0  # a heartbeat is lost
    broken: float = 0.0  # one sequence of a step comes to nothing (no finite logit)
    raised: float = 0.0  # the executor raises, its pages intact
    deaths: float = 0.0  # an instance dies with its node's memory; another joins later
    stale_views: float = 0.0  # the conductor's view is delayed for a while
    lost_pages: float = 0.0  # an executor raises and its pages are lost; another instance joins later
    rotten: float = 0.0  # a bit of a block is flipped where it rests on an SSD
    ssd_outages: float = 0.0  # an SSD refuses everything for a while
    nic_outages: float = 0.0  # a NIC of a node that has several carries nothing for a while

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            limit = 20.0 if item.name in TIMED else 1.0
            if not 0.0 <= value <= limit:
                raise ConfigError(f"faults.{item.name}", value, f"must be between 0 and {limit:g}")


@dataclass(slots=True)
class FaultCounts:
    """How many of each kind were injected."""

    counts: dict[str, int] = field(default_factory=dict[str, int])

    def note(self, kind: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1


@dataclass(frozen=True, slots=True)
class TimedFault:
    """Something that happens to the cluster at `at_s`."""

    at_s: float
    kind: str
    value: float


def timed_faults(faults: Faults, horizon_s: float, rng: np.random.Generator) -> list[TimedFault]:
    """What happens to the cluster in one schedule, in order of time."""
    found: list[TimedFault] = []
    for name, kind in TIMED.items():
        expected: float = getattr(faults, name)
        for _ in range(int(rng.poisson(expected))):
            found.append(TimedFault(float(rng.uniform(0, horizon_s)), kind, float(rng.uniform(0, 1))))
    return sorted(found, key=lambda fault: fault.at_s)
