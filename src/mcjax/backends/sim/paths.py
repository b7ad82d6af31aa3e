"""Links, the paths of flows that are served alike, and the max-min rates at which they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from mcjax import aio
from mcjax.types import NS_PER_S

if TYPE_CHECKING:
    from mcjax.backends.sim.links import Flow

_FORGIVEN_NS = 1 / 1024
"""Ends are rounded up to whole nanoseconds; float rounding below this must not cost one more."""

_NOTHING = 1e-9
"""What is left of a link, as a share of it, that is float rounding and no room for a lower class."""

NEVER_NS = 1 << 62


class Link:
    """A link, what crosses it now, and scratch space for one round of filling."""

    __slots__ = ("bytes_per_s", "ended_bytes", "flows", "latency_ns", "left", "paths", "stamp", "unfilled")

    def __init__(self, bytes_per_s: float, latency_ns: int):
        self.bytes_per_s = bytes_per_s
        self.latency_ns = latency_ns
        self.paths: dict[Path, None] = {}
        self.flows = 0
        self.ended_bytes = 0
        self.stamp = 0
        self.left = 0.0
        self.unfilled = 0


class Path:
    """Flows of one class that cross the same links at the same rate, and their service clock.

    `service` is the clock's reading at `since_ns`, in bytes; it runs at `rate`, in bytes per second. Only a change of
    rate sets them anew. `flows` is a heap of (reading at which the flow is done, order of start, flow).
    """

    __slots__ = (
        "bytes_per_s",
        "end_ns",
        "filled",
        "flows",
        "latency_ns",
        "links",
        "lone",
        "priority",
        "rate",
        "service",
        "since_ns",
        "stamp",
        "timer",
    )

    def __init__(self, links: tuple[Link, ...], priority: int):
        self.links = links
        self.priority = priority
        self.latency_ns = sum(link.latency_ns for link in links)
        self.bytes_per_s = min(link.bytes_per_s for link in links)
        self.flows: list[tuple[float, int, Flow]] = []
        self.service = 0.0
        self.since_ns = 0
        self.rate = 0.0
        self.end_ns = NEVER_NS
        self.timer: aio.Timer | None = None
        self.lone: Flow | None = None
        """The only flow, when no link of the path has another: it waits for its arrival, not for the end of service."""
        self.stamp = 0
        self.filled = 0

    def reading(self, now_ns: int) -> float:
        return self.service + self.rate * (now_ns - self.since_ns) / NS_PER_S

    def next_end_ns(self) -> int:
        """When the first of the flows is done if the rate stays."""
        if not self.rate:
            return NEVER_NS  # a higher class has taken all
        left_ns = (self.flows[0][0] - self.service) * NS_PER_S / self.rate - _FORGIVEN_NS
        return self.since_ns + math.ceil(left_ns) if left_ns > 0.0 else self.since_ns

    def set_rate(self, rate: float, now_ns: int) -> None:
        if rate != self.rate:
            self.service = self.reading(now_ns)
            self.since_ns = now_ns
            self.rate = rate

    def set_timer(self, clock: aio.Clock, on_timer: Callable[[Path], object]) -> None:
        if self.timer is not None:
            if self.timer.when_ns == self.end_ns:
                return
            self.timer.cancel()
        self.timer = clock.call_at_ns(self.end_ns, on_timer, self)

    def drop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


def fill(links: list[Link], paths: list[Path], priorities: list[int], stamp: int, now_ns: int) -> None:
    """Max-min rates, class by class: each shares what the higher ones leave."""
    if len(priorities) == 1:
        _fill_class(links, len(paths), priorities[0], stamp, now_ns)
        return
    for priority in priorities:
        members = [path for path in paths if path.priority == priority]
        if not members:
            continue
        for link in links:
            link.unfilled = 0
            if link.left <= link.bytes_per_s * _NOTHING:
                link.left = 0.0
        for path in members:
            for link in path.links:
                link.unfilled += len(path.flows)
        _fill_class([link for link in links if link.unfilled], len(members), priority, stamp, now_ns)


def _fill_class(links: list[Link], paths: int, priority: int, stamp: int, now_ns: int) -> None:
    """Raise all alike until a link is full, settle the flows on it, go on with the rest."""
    level = 0.0
    open_links = links
    while paths:
        tightest = open_links[0]
        lowest = math.inf
        for link in open_links:
            share = link.left / link.unfilled
            if share < lowest:
                lowest = share
                tightest = link
        # The level never falls; without this, rounding could leave a last link a hair below it, or below zero.
        level = max(level, lowest)
        for path in tightest.paths:
            if path.filled != stamp and path.priority == priority:
                path.filled = stamp
                path.set_rate(level, now_ns)
                paths -= 1
                count = len(path.flows)
                for link in path.links:
                    link.left -= level * count
                    link.unfilled -= count
        open_links = [link for link in open_links if link.unfilled]
