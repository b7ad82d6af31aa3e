"""Reports: the only way that policy learns of the cluster.

Everybody reports every period; a report shows the state as of its tick. Nothing is sent on a tick: a row is kept when
something changes, and becomes visible at the next tick (plus the configured delay) when somebody reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from mcjax import aio
from mcjax.types import BlockId

LOAD = "load"
BLOCKS_ADDED = "blocks+"
BLOCKS_REMOVED = "blocks-"

LOAD_COLUMNS = ("accepted", "queue_ns", "batch", "context_tokens", "free_tokens", "outgoing_bytes")
"""What a load report holds: jobs taken on so far, estimated prompt work queued, sequences and tokens being decoded,
tokens that still fit, bytes queued to leave the node."""


@dataclass(slots=True)
class Report:
    """State of `source` as of `tick_ns`. `values` is a row of `LOAD_COLUMNS`, or block ids."""

    tick_ns: int
    source: str
    kind: str
    values: Sequence[int]


class ReportBus:
    """Collects rows from publishers and hands over those whose tick has come.

    `delay_ns` makes every view older than it need be; the checking world changes it in mid-run.
    """

    def __init__(self, period_ns: int, delay_ns: int = 0):
        self.period_ns = period_ns
        self.delay_ns = delay_ns
        self._pending: deque[Report] = deque()
        self._latest: dict[str, Report] = {}

    def _next_tick_ns(self) -> int:
        return (aio.now_ns() // self.period_ns + 1) * self.period_ns

    def load(self, source: str, row: Sequence[int]) -> None:
        """The load of instance `source` is now `row`; only the last row before a tick is ever seen."""
        tick_ns = self._next_tick_ns()
        latest = self._latest.get(source)
        if latest is not None and latest.tick_ns == tick_ns:
            latest.values = row
            return
        latest = Report(tick_ns, source, LOAD, row)
        self._latest[source] = latest
        self._pending.append(latest)

    def blocks(self, node: str, sign: int, blocks: Sequence[BlockId]) -> None:
        """Blocks have come to (`sign` > 0) or gone from `node`."""
        self._pending.append(Report(self._next_tick_ns(), node, BLOCKS_ADDED if sign > 0 else BLOCKS_REMOVED, blocks))

    def read(self) -> list[Report]:
        """Everything that has become visible since the last read, oldest first."""
        visible_ns = aio.now_ns() - self.delay_ns
        pending = self._pending
        seen: list[Report] = []
        while pending and pending[0].tick_ns <= visible_ns:
            seen.append(pending.popleft())
        return seen
