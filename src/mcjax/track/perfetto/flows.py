"""Which slice of a request came of which others: where one has left blocks, the next one finds them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from mcjax.types import Tier


class Location(NamedTuple):
    """A tier of a node."""

    node: str
    tier: str


Way = Literal["stay", "within", "across"]
"""How a slice goes on from what it found: it computes there, moves blocks to another tier, or to another node."""
WAYS: tuple[Way, ...] = ("stay", "within", "across")
ROOT = 0
"""Number of the instant at which a request was submitted; its slices count from 1."""


def flow_of(request_id: int, slice_number: int, way: Way) -> int:
    """The number of the flow on which a slice of a request hands on, below 2^64 for 2^40 requests of 2^22 slices."""
    return (request_id + 1) << 24 | slice_number << 2 | WAYS.index(way)


@dataclass(slots=True)
class _Left:
    """What a slice has left somewhere."""

    number: int
    end_ns: int
    wanted: bool = True
    """Nobody has gone on from it yet."""


@dataclass(slots=True)
class _Trail:
    """A request on its way."""

    slices: int = 0
    left: dict[Location, list[_Left]] = field(default_factory=dict[Location, list[_Left]])
    ready_ns: dict[Location, int] = field(default_factory=dict[Location, int])


class Flows:
    """Ties slices as they come, in order of their ends. A request is remembered until `end`.

    A slice goes on from the last one that had left something where it begins, and from all before it that nobody has
    gone on from; if there are none, from the request's submission. So of a prompt computed in chunks, each chunk is
    tied to its own copies, and the copy that begins decoding to all that it waited for.
    """

    def __init__(self) -> None:
        self._trails: dict[int, _Trail] = {}

    def computed(self, request_id: int, at: Location, start_ns: int, end_ns: int) -> list[int]:
        """Flows of a slice that computes where its blocks are."""
        flows = self._step(request_id, at, at, "stay", start_ns, end_ns)
        self._trails[request_id].ready_ns[at] = end_ns
        return flows

    def moved(self, request_id: int, source: Location, target: Location, start_ns: int, end_ns: int) -> list[int]:
        """Flows of a transfer."""
        flows = self._step(
            request_id, source, target, "within" if source.node == target.node else "across", start_ns, end_ns
        )
        if target.tier == Tier.HBM:
            self._trails[request_id].ready_ns.setdefault(target, end_ns)
        return flows

    def held(self, request_id: int, at: Location, taken_ns: int, end_ns: int) -> tuple[int, list[int]]:
        """When the request had its blocks computed or loaded at a place that it now leaves, and the flows of the slice
        from then on."""
        trail = self._trails.setdefault(request_id, _Trail())
        start_ns = min(max(taken_ns, trail.ready_ns.pop(at, taken_ns)), end_ns)
        return start_ns, self._step(request_id, at, at, "stay", start_ns, end_ns)

    def end(self, request_id: int) -> list[int]:
        """Flows of the instant at which the request ended: from the slice that ended last. It is forgotten."""
        trail = self._trails.pop(request_id, _Trail())
        entries = [entry for entries in trail.left.values() for entry in entries]
        last = max(entries, key=lambda entry: (entry.end_ns, entry.number), default=_Left(ROOT, 0))
        return [flow_of(request_id, last.number, "stay")]

    def _step(
        self, request_id: int, source: Location, target: Location, way: Way, start_ns: int, end_ns: int
    ) -> list[int]:
        trail = self._trails.setdefault(request_id, _Trail())
        trail.slices += 1
        found = trail.left.get(source, [])
        before = [entry for entry in found if entry.end_ns <= start_ns]
        come_from = [entry.number for entry in before if entry.wanted or entry is before[-1]] or [ROOT]
        for entry in before:
            entry.wanted = False
        if before:
            trail.left[source] = [before[-1], *(entry for entry in found if entry.end_ns > start_ns)]
        trail.left.setdefault(target, []).append(_Left(trail.slices, end_ns))
        onward = [flow_of(request_id, trail.slices, each) for each in WAYS]
        return [*(flow_of(request_id, number, way) for number in come_from), *onward]


def submitted(request_id: int) -> list[int]:
    """Flows of the instant at which a request is submitted."""
    return [flow_of(request_id, ROOT, way) for way in WAYS]
