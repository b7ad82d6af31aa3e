"""Where replicas of a span go, where they are read, and which of too many leaves: pure choices over a few sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Site:
    """A node that could have a replica, or has one."""

    node: str
    domain: str
    """What fails together: of two replicas in one domain the second is worth nothing."""
    free_blocks: int = 0
    outgoing_bytes: int = 0
    """Queued to leave it."""
    made: bool = False
    """Whether the replica there is a copy; else it was there anyway."""


def elsewhere(holders: Sequence[Site], sites: Sequence[Site]) -> list[Site]:
    """Those of `sites` where one more replica is worth something, best first: in the domain of no holder; the one with
    the most room first (ties: in the order given)."""
    taken = [holder.domain for holder in holders]
    return sorted((site for site in sites if site.domain not in taken), key=lambda site: -site.free_blocks)


def least_loaded(holders: Sequence[Site]) -> Site | None:
    """The replica to read: whose node has the least queued to send (ties: the first)."""
    return min(holders, key=lambda site: site.outgoing_bytes, default=None)


def surplus(holders: Sequence[Site], copies: int) -> list[Site]:
    """Which of too many replicas go: copies before what was there anyway, and those with the least room around them
    (ties: the last)."""
    kept = sorted(holders, key=lambda site: (site.made, -site.free_blocks))[:copies]
    return [site for site in holders if site not in kept]
