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
from mcjax.types import BlockId, Tier

LOAD = "load"
INSTANCES = "instances"
"""The source of load reports: they come for all instances together."""

BLOCKS_ADDED = "blocks+"
BLOCKS_REMOVED = "blocks-"
SSD_ADDED = "ssd+"
SSD_REMOVED = "ssd-"
"""Of host memories, and of SSDs."""

SSD_QUEUE = "ssd_queue"
"""Bytes queued to be read from a node's SSD or written to it: the only value."""

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
        steps = int(ends_ns.searchsorted(tick_ns))
        return self.batch * steps, int(ends_ns[steps - 1]) if steps else -1


@dataclass(slots=True)
class Report:
    """State as of `tick_ns`. Values of `LOAD`: a row an instance that changed, `(number, tick_ns, *LOAD_COLUMNS)`, one
    behind the other; of `SSD_QUEUE`: the bytes; of the others: block ids that came to or left the node `source`."""

    tick_ns: int
    source: str
    kind: str
    values: Sequence[int] | NDArray[np.int64]


def load_report(tick_ns: int, rows: Sequence[Sequence[int]]) -> Report:
    """The report of several instances' loads, each `(number, tick_ns, *LOAD_COLUMNS)`."""
    return Report(tick_ns, INSTANCES, LOAD, np.array(rows, np.int64).ravel())


@dataclass(slots=True)
class _Load:
    """An instance's load as of a tick to come, and what its running step adds by then."""

    tick_ns: int
    number: int
    row: Sequence[int]
    growth: Growth | None
    grown: int = 0


class ReportBus:
    """Collects rows from publishers and hands over those whose tick has come.

    `delay_ns` makes every view older than it need be; the checking world changes it in mid-run.
    """

    def __init__(self, period_ns: int, delay_ns: int = 0):
        self.period_ns = period_ns
        self.delay_ns = delay_ns
        self._rows: deque[Report] = deque()
        self._queued: dict[str, Report] = {}
        self._loads: deque[_Load] = deque()
        self._latest: list[_Load | None] = []
        self._growing: dict[int, _Load] = {}
        self._read_ns = -1

    def _tick_after(self, time_ns: int) -> int:
        return (time_ns // self.period_ns + 1) * self.period_ns

    def join(self) -> int:
        """A further instance will report its load: the number it is known by."""
        self._latest.append(None)
        return len(self._latest) - 1

    def load(self, number: int, row: Sequence[int], growth: Growth | None = None) -> None:
        """The load of an instance is now `row`, and grows with its running step; only the last row before a tick is
        ever seen."""
        period_ns = self.period_ns
        tick_ns = (aio.now_ns() // period_ns + 1) * period_ns
        latest = self._latest[number]
        if latest is not None and latest.tick_ns == tick_ns:
            latest.row, latest.growth = row, growth
            return
        latest = _Load(tick_ns, number, row, growth)
        self._latest[number] = latest
        self._loads.append(latest)

    def blocks(self, node: str, sign: int, blocks: Sequence[BlockId], tier: Tier = Tier.DRAM) -> None:
        """Blocks have come to (`sign` > 0) or gone from a tier of `node`."""
        if tier is Tier.SSD:
            kind = SSD_ADDED if sign > 0 else SSD_REMOVED
        else:
            kind = BLOCKS_ADDED if sign > 0 else BLOCKS_REMOVED
        self._rows.append(Report(self._tick_after(aio.now_ns()), node, kind, blocks))

    def ssd_queue(self, node: str, nbytes: int) -> None:
        """So many bytes are queued at the SSD of `node` now; only the last figure before a tick is ever seen."""
        tick_ns = self._tick_after(aio.now_ns())
        latest = self._queued.get(node)
        if latest is not None and latest.tick_ns == tick_ns:
            latest.values = (nbytes,)
            return
        latest = self._queued[node] = Report(tick_ns, node, SSD_QUEUE, (nbytes,))
        self._rows.append(latest)

    def read(self) -> list[Report]:
        """Everything that has become visible since the last read: what came of nodes, oldest first, then the loads that
        changed."""
        visible_ns = aio.now_ns() - self.delay_ns
        rows, loads = self._rows, self._loads
        seen: list[Report] = []
        while rows and rows[0].tick_ns <= visible_ns:
            seen.append(rows.popleft())
        tick_ns = visible_ns // self.period_ns * self.period_ns
        if tick_ns != self._read_ns or (loads and loads[0].tick_ns <= visible_ns):
            self._read_ns = tick_ns
            changed = self._changed(visible_ns, tick_ns)
            if changed:
                seen.append(load_report(tick_ns, changed))
        return seen

    def _changed(self, visible_ns: int, tick_ns: int) -> list[list[int]]:
        """The last visible row of each instance whose load has changed."""
        loads, growing = self._loads, self._growing
        rows: dict[int, list[int]] = {}
        while loads and loads[0].tick_ns <= visible_ns:
            load = loads.popleft()
            rows[load.number] = [load.number, load.tick_ns, *load.row]
            growing.pop(load.number, None)
            if load.growth is not None:
                growing[load.number] = load
        for load in growing.values():
            assert load.growth is not None
            tokens, end_ns = load.growth.by(tick_ns)
            if tokens > load.grown:
                load.grown = tokens
                row = [load.number, self._tick_after(end_ns), *load.row]
                row[2 + CONTEXT] += tokens
                rows[load.number] = row
        return list(rows.values())
