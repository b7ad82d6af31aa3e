"""Reports: the only way that policy learns of the cluster.

Everybody reports every period; a report shows the state as of its tick. Nothing is sent on a tick: a row is kept when
something changes, and becomes visible at the next tick (plus the configured delay) when somebody reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mcjax import aio
from mcjax.types import BlockId

LOAD = "load"
BLOCKS_ADDED = "blocks+"
BLOCKS_REMOVED = "blocks-"

LOAD_COLUMNS = ("accepted", "queue_ns", "batch", "context_tokens", "free_tokens", "outgoing_bytes")
"""What a load report holds: jobs taken on so far, estimated prompt work queued, sequences and tokens being decoded,
tokens that still fit, bytes queued to leave the node."""

CONTEXT = LOAD_COLUMNS.index("context_tokens")


class Growth:
    """What a running decode step, or a macro-step of many, has added to `context_tokens` by a time: `batch` a step.

    It stays right when the step is over, so that a report can be as of any tick, whenever it is read.
    """

    def __init__(self, batch: int, ends_ns: Callable[[], NDArray[np.int64]]):
        self.batch = batch
        self._ends_ns = ends_ns

    def settle(self, ends_ns: NDArray[np.int64]) -> None:
        """The macro-step is over, and these were its steps' ends."""
        self._ends_ns = lambda: ends_ns

    def by(self, tick_ns: int) -> tuple[int, int]:
        """Tokens added before `tick_ns`, and when the last of them were (-1 if none)."""
        ends_ns = self._ends_ns()
        steps = int(np.searchsorted(ends_ns, tick_ns))
        return self.batch * steps, int(ends_ns[steps - 1]) if steps else -1


@dataclass(slots=True)
class Report:
    """State of `source` as of `tick_ns`. `values` is a row of `LOAD_COLUMNS`, or block ids."""

    tick_ns: int
    source: str
    kind: str
    values: Sequence[int]
    growth: Growth | None = None


class ReportBus:
    """Collects rows from publishers and hands over those whose tick has come.

    `delay_ns` makes every view older than it need be; the checking world changes it in mid-run.
    """

    def __init__(self, period_ns: int, delay_ns: int = 0):
        self.period_ns = period_ns
        self.delay_ns = delay_ns
        self._pending: deque[Report] = deque()
        self._latest: dict[str, Report] = {}
        self._growing: dict[str, Report] = {}
        self._grown: dict[str, int] = {}

    def _tick_after(self, time_ns: int) -> int:
        return (time_ns // self.period_ns + 1) * self.period_ns

    def load(self, source: str, row: Sequence[int], growth: Growth | None = None) -> None:
        """The load of instance `source` is now `row`, and grows with its running step; only the last row before a tick
        is ever seen."""
        tick_ns = self._tick_after(aio.now_ns())
        latest = self._latest.get(source)
        if latest is not None and latest.tick_ns == tick_ns:
            latest.values, latest.growth = row, growth
            return
        latest = Report(tick_ns, source, LOAD, row, growth)
        self._latest[source] = latest
        self._pending.append(latest)

    def blocks(self, node: str, sign: int, blocks: Sequence[BlockId]) -> None:
        """Blocks have come to (`sign` > 0) or gone from `node`."""
        kind = BLOCKS_ADDED if sign > 0 else BLOCKS_REMOVED
        self._pending.append(Report(self._tick_after(aio.now_ns()), node, kind, blocks))

    def read(self) -> list[Report]:
        """Everything that has become visible since the last read, oldest first."""
        visible_ns = aio.now_ns() - self.delay_ns
        pending = self._pending
        seen: list[Report] = []
        while pending and pending[0].tick_ns <= visible_ns:
            report = pending.popleft()
            seen.append(report)
            if report.kind == LOAD:
                self._growing.pop(report.source, None)
                if report.growth is not None:
                    self._growing[report.source] = report
                    self._grown[report.source] = 0
        tick_ns = visible_ns // self.period_ns * self.period_ns
        for source, report in self._growing.items():
            assert report.growth is not None
            tokens, end_ns = report.growth.by(tick_ns)
            if tokens > self._grown[source]:
                self._grown[source] = tokens
                row = list(report.values)
                row[CONTEXT] += tokens
                seen.append(Report(self._tick_after(end_ns), source, LOAD, row))
        return seen
