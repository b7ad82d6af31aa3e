"""From one memory to another: every path there is, and which of them are to be had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcjax.transfer.base import Memory, Rail
from mcjax.transfer.paths.base import Candidate
from mcjax.transfer.paths.path import Path


@dataclass(frozen=True, slots=True)
class Lane:
    """A path, and what it is as seen from these two memories."""

    path: Path
    rail: Rail

    @property
    def order(self) -> tuple[int, bool]:
        """Lanes of a lower one are preferred."""
        return self.path.rank, self.rail.spare

    def candidate(self) -> Candidate:
        bytes_per_s, latency_s = self.path.estimate.line()
        path = self.path
        return Candidate(path.name, self.rail, path.queued_bytes, bytes_per_s, latency_s, path.moved_bytes)


class Way:
    """All lanes from `source` to `target`, those of the preferred transport first."""

    __slots__ = ("lanes", "nodes", "only", "tiers")

    def __init__(self, source: Memory, target: Memory, lanes: Sequence[Lane]):
        self.lanes = tuple(lanes)
        self.only = self.lanes[0].path if len(self.lanes) == 1 else None
        """Set where there is nothing to choose."""
        self.nodes = f"{source.node}>{target.node}"
        self.tiers = f"{source.tier}>{target.tier}"

    def usable(self, now_ns: int, tried: Sequence[Path] = ()) -> list[Lane]:
        """Lanes that a copy may take now, which has been on `tried` before: of those that are well, or due to be
        probed, those that it has tried least; of these, those of the most preferred transport, and no spares if there
        are others. If none is well, the one that it has tried least, and will be probed first."""
        found = [lane for lane in self.lanes if lane.path.health.may_try(now_ns)]
        if not found:
            return [min(self.lanes, key=lambda lane: (tried.count(lane.path), lane.path.health.away_until_ns))]
        if tried:
            fewest = min(tried.count(lane.path) for lane in found)
            found = [lane for lane in found if tried.count(lane.path) == fewest]
        best = min(lane.order for lane in found)
        return [lane for lane in found if lane.order == best]
