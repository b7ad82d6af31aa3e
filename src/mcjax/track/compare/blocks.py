"""Blocks of arrival time: what is drawn where one run stands for a group, whose requests depend on their neighbours.

A moving queue ties a request to its neighbours, so whole stretches of time are resampled (the block bootstrap; Lahiri,
Resampling Methods for Dependent Data, 2003, chapter 2). Blocks must be longer than that dependence reaches, and many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import RunError
from mcjax.track.arrow import Table, compute
from mcjax.track.run import Run
from mcjax.track.tables import integers
from mcjax.types import NS_PER_S

FEWEST, MOST = 20, 50
LEAST_REQUESTS = 5 * FEWEST
LIVES = 90
"""A block is to be longer than so many percent of the requests live."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Equal stretches of time from the start of the window to the last arrival."""

    start_ns: int
    end_ns: int
    count: int
    life_ns: int
    """How long requests live: the percentile `LIVES`."""
    ids: NDArray[np.int64] = field(repr=False)
    """Requests of the first run, in order, and the block of each."""
    blocks: NDArray[np.int64] = field(repr=False)

    @property
    def length_ns(self) -> float:
        return (self.end_ns - self.start_ns) / self.count

    @property
    def too_short(self) -> bool:
        """Whether blocks are shorter than lives: neighbours then hang together, and intervals come out too narrow."""
        return self.length_ns < self.life_ns

    def of(self, table: Table) -> NDArray[np.int64]:
        """`[N]`: the block of each request.

        It is where the request arrived in the first run, so that all runs of one traffic have the same in each block:
        when a later turn comes depends on the answers. A request that the first run lacks goes by its own arrival.
        """
        found = _block_at(integers(table, "arrival_ns"), self.start_ns, self.end_ns, self.count)
        ids = integers(table, "request_id")
        at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[at] == ids, self.blocks[at], found)

    def __str__(self) -> str:
        return f"{self.count} blocks of {self.length_ns / NS_PER_S:.3g} s of arrivals"


def blocks_of(runs: Sequence[Run]) -> Blocks | str:
    """One division for all of `runs`, which met the same traffic; or why there is none.

    There are as many blocks as are longer than nine tenths of the requests live, but 20 at least and 50 at most.
    """
    starts = [warmup_ns(run) for run in runs]
    start_ns, end_ns, life_ns = min(starts), 0, 0
    for run, first_ns in zip(runs, starts, strict=True):
        kept = requests_of(run, "arrival_ns", "finish_ns")
        if kept is None:
            return "their requests were not kept"
        table = in_window(kept, first_ns)
        if table.num_rows < LEAST_REQUESTS:
            return f"{table.num_rows} requests are too few to resample ({LEAST_REQUESTS} are needed)"
        arrivals_ns = integers(table, "arrival_ns")
        lives_ns = integers(table, "finish_ns") - arrivals_ns
        end_ns = max(end_ns, int(arrivals_ns.max()))
        life_ns = max(life_ns, int(np.percentile(lives_ns, LIVES)))
    if end_ns <= start_ns:
        return "all requests arrive at once"
    count = int(np.clip((end_ns - start_ns) // max(life_ns, 1), FEWEST, MOST))
    first = runs[0].columns("requests", "request_id", "arrival_ns").sort_by("request_id")
    blocks = _block_at(integers(first, "arrival_ns"), start_ns, end_ns, count)
    return Blocks(start_ns, end_ns, count, life_ns, integers(first, "request_id"), blocks)


def _block_at(arrivals_ns: NDArray[np.int64], start_ns: int, end_ns: int, count: int) -> NDArray[np.int64]:
    return np.clip((arrivals_ns - start_ns) * count // (end_ns - start_ns), 0, count - 1)


def warmup_ns(run: Run) -> int:
    """Where the run's window begins."""
    return round(float(run.record.config.get("track.warmup_s") or 0) * NS_PER_S)


def requests_of(run: Run, *columns: str) -> Table | None:
    """Columns of its requests, or None if it did not keep them."""
    try:
        table = run.columns("requests", *columns)
    except (KeyError, RunError):
        return None
    counts = run.summary.get("requests", {})
    return table if table.num_rows or not counts.get("submitted") else None


def in_window(table: Table, start_ns: int) -> Table:
    return table.filter(compute().greater_equal(table.column("arrival_ns"), start_ns))


def same_traffic(first: Run, second: Run) -> bool:
    """Whether the sessions of two runs begin at the same times with prompts of the same lengths.

    Later turns are left out: when they come depends on the answers. Runs that kept no requests cannot say so.
    """
    begun: list[NDArray[np.int64]] = []
    for run in (first, second):
        kept = requests_of(run, "arrival_ns", "turn", "prompt_tokens")
        if kept is None:
            return False
        table = kept.filter(compute().equal(kept.column("turn"), 0))
        columns = np.stack([integers(table, "arrival_ns"), integers(table, "prompt_tokens")])
        begun.append(columns[:, np.lexsort(columns[::-1])])
    return bool(np.array_equal(begun[0], begun[1]))
