"""Statistics of a workload without running it: lengths, arrivals, what could be reused at best, and offered load."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from math import fsum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.cost.base import CostModel
from mcjax.types import NS_PER_S, Request
from mcjax.workload.base import Session, Workload
from mcjax.workload.readable import rows
from mcjax.workload.streams import whole

DEFAULT_BLOCK_TOKENS = 32
"""For prompts of tokens, where the workload dictates no block size and the caller gives none."""

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """Every request of a workload in order of arrival, `[R]`; and every block reference in that order, `[B]`.

    Later turns arrive their think time after the turn before and its children: as if answers took no time. Blocks are
    dense numbers; blocks of different tenants are never the same one. `block_tokens` counts the prompt tokens in each
    reference: below the block size in a last, partial block.
    """

    sessions: int
    starts_ns: Integers
    """`[S]` when sessions start."""
    arrival_ns: Integers
    input_tokens: Integers
    output_tokens: Integers
    block_size: int
    blocks: Integers
    request: Integers
    """`[B]` which request refers to the block."""
    block_tokens: Integers


class _Columns:
    """What is noted down while a workload is played."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.starts: array[int] = array("q")
        self.arrival: array[int] = array("q")
        self.input: array[int] = array("q")
        self.output: array[int] = array("q")
        self.tenant: array[int] = array("q")
        self.ids: array[int] = array("q")
        self.counts: array[int] = array("q")
        self._tenants: dict[str, int] = {}
        self._chained: dict[tuple[int, bytes], int] = {}

    def note(self, request: Request, arrival_ns: int, output_tokens: int) -> None:
        self.arrival.append(arrival_ns)
        self.input.append(request.prompt_tokens)
        self.output.append(output_tokens)
        self.tenant.append(self._tenants.setdefault(request.tenant, len(self._tenants)))
        ids = request.trace_ids if request.tokens is None else self._cut(request)
        self.ids.extend(ids or ())
        self.counts.append(len(ids or ()))

    def _cut(self, request: Request) -> list[int]:
        """Chained ids of a prompt's blocks: negative, apart from those of traces."""
        assert request.tokens is not None
        ids: list[int] = []
        last = 0
        for start in range(0, request.prompt_tokens, self.block_size):
            block = request.tokens[start : start + self.block_size].tobytes()
            last = self._chained.setdefault((last, block), -1 - len(self._chained))
            ids.append(last)
        return ids

    def played(self) -> Played:
        arrival, counts = _numbers(self.arrival), _numbers(self.counts)
        order = np.argsort(arrival, kind="stable")
        offsets = np.cumsum(counts) - counts
        ordered_counts = counts[order]
        request = np.repeat(np.arange(len(order)), ordered_counts)
        within = np.arange(len(request)) - np.repeat(np.cumsum(ordered_counts) - ordered_counts, ordered_counts)
        reference = np.repeat(offsets[order], ordered_counts) + within
        dense = np.unique(_numbers(self.ids), return_inverse=True)[1].astype(np.int64)[reference]
        owned = dense * max(1, len(self._tenants)) + _numbers(self.tenant)[order][request]
        left = _numbers(self.input)[order][request] - within * self.block_size
        return Played(
            sessions=len(self.starts),
            starts_ns=_numbers(self.starts),
            arrival_ns=arrival[order],
            input_tokens=_numbers(self.input)[order],
            output_tokens=_numbers(self.output)[order],
            block_size=self.block_size,
            blocks=np.unique(owned, return_inverse=True)[1].astype(np.int64),
            request=request,
            block_tokens=np.minimum(left, self.block_size),
        )


def _numbers(column: array[int]) -> Integers:
    return np.array(column, np.int64)


def play(workload: Workload, block_tokens: int | None = None) -> Played:
    """Ask every session for its turns, by its scripts. `block_tokens`: where the workload dictates no block size."""
    size = workload.block_tokens or (DEFAULT_BLOCK_TOKENS if block_tokens is None else block_tokens)
    columns = _Columns(whole("block_tokens", size, 1))
    for session in workload.sessions():
        columns.starts.append(session.start_ns)
        _play(session, 0, columns)
    return columns.played()


def _play(session: Session, from_ns: int, columns: _Columns) -> int:
    """Note the requests of a session that starts at `from_ns` (a child) or in its own time (0); when it was over."""
    turn, time_ns = session.next_turn(None), from_ns
    while turn is not None:
        time_ns += turn.request.arrival_ns
        columns.note(turn.request, time_ns, turn.script.output_tokens)
        for child in turn.background:
            _play(child, time_ns, columns)
        time_ns = max([time_ns, *(_play(child, time_ns, columns) for child in turn.children)])
        turn = session.next_turn(None)
    return time_ns


@dataclass(frozen=True, slots=True, eq=False)
class Reuse:
    """References to blocks, with what lies between a reference and the last one to the same block (`[H]`, of hits)."""

    references: int
    unique: int
    once: int
    hottest: int
    block_hit: float
    """Share of references that a cache that never forgets has."""
    token_hit: float
    """The same by prompt tokens, of all prompt tokens."""
    gap_s: NDArray[np.float64]
    """Seconds since."""
    distance_blocks: Integers
    """Different blocks referred to in between: a cache of more blocks than this still has it, under LRU."""


def reuse(played: Played, count_partial: bool = False) -> Reuse:
    """Reuse of full blocks, which is what a pool shares; `count_partial`: as if partial blocks could be shared too.

    Published statistics of the Mooncake traces count them.
    """
    kept = np.ones(len(played.blocks), bool) if count_partial else played.block_tokens == played.block_size
    blocks, tokens = played.blocks[kept], played.block_tokens[kept]
    times_ns = played.arrival_ns[played.request[kept]]
    order = np.argsort(blocks, kind="stable")
    again = np.flatnonzero(np.diff(blocks[order]) == 0) + 1
    before, now = order[again - 1], order[again]
    in_time = np.argsort(now, kind="stable")
    before, now = before[in_time], now[in_time]
    counts = np.bincount(blocks)
    counts = counts[counts > 0]
    all_tokens = int(played.input_tokens.sum())
    return Reuse(
        references=len(blocks),
        unique=len(counts),
        once=int((counts == 1).sum()),
        hottest=int(counts.max(initial=0)),
        block_hit=len(now) / max(1, len(blocks)),
        token_hit=int(tokens[now].sum()) / max(1, all_tokens),
        gap_s=(times_ns[now] - times_ns[before]) / NS_PER_S,
        distance_blocks=now - before - 1 - _larger_before(before),
    )


def _larger_before(values: Integers) -> Integers:
    """For each of some different numbers, how many larger ones stand before it: bit by bit, from the highest."""
    ranks = np.argsort(np.argsort(values))
    counts = np.zeros(len(ranks), np.int64)
    order = np.arange(len(ranks))
    for bit in reversed(range(len(ranks).bit_length())):
        # Here `order` holds groups of equal higher bits, each in the order of the values.
        current = ranks[order]
        ones = (current >> bit) & 1
        running = np.cumsum(ones) - ones
        starts = np.flatnonzero(np.diff(current >> (bit + 1), prepend=-1))
        base = np.repeat(running[starts], np.diff(starts, append=len(current)))
        counts[order] += np.where(ones == 0, running - base, 0)
        order = order[np.argsort(current >> bit, kind="stable")]
    return counts


def lru_hit(found: Reuse, capacity_blocks: int) -> float:
    """Share of references that one LRU cache of so many blocks has."""
    return int((found.distance_blocks < capacity_blocks).sum()) / max(1, found.references)


def spread(values: NDArray[Any]) -> dict[str, float]:
    """Mean, percentiles (interpolated) and maximum; {} of nothing."""
    if len(values) == 0:
        return {}
    quantiles = np.percentile(values, (50, 90, 99)).tolist()
    mean = fsum(values.tolist()) / len(values)
    return dict(zip(("mean", "p50", "p90", "p99", "max"), (mean, *quantiles, values.max().item()), strict=True))


def _duration_s(times_ns: Integers) -> float:
    return float(times_ns.max() - times_ns.min()) / NS_PER_S if len(times_ns) else 0.0


def _cv(times_ns: Integers) -> float:
    """Coefficient of variation of the gaps; NaN of fewer than two."""
    gaps = np.diff(times_ns).astype(np.float64)
    return float(gaps.std() / gaps.mean()) if len(gaps) > 1 and gaps.mean() > 0 else float("nan")


def prefill_s(played: Played, cost: CostModel) -> float:
    """Seconds that one instance would compute to prefill every prompt without any cache."""
    lengths, counts = np.unique(played.input_tokens, return_counts=True)
    pairs = zip(lengths.tolist(), counts.tolist(), strict=True)
    return sum(cost.prefill_ns(0, length) * count for length, count in pairs) / NS_PER_S


def _of_reuse(found: Reuse) -> dict[str, Any]:
    return {
        "block_references": found.references,
        "unique_blocks": found.unique,
        "blocks_referenced_once": found.once,
        "hottest_block_references": found.hottest,
        "block_hit": found.block_hit,
        "token_hit": found.token_hit,
        "gap_s": spread(found.gap_s),
        "distance_blocks": spread(found.distance_blocks),
    }


def describe(workload: Workload, cost: CostModel | None = None, block_tokens: int | None = None) -> dict[str, Any]:
    """Everything that can be said of a workload without running it; see `of_played`."""
    return of_played(play(workload, block_tokens), workload.name, cost)


def of_played(played: Played, name: str, cost: CostModel | None = None) -> dict[str, Any]:
    """Statistics by name; units are in the names.

    `reuse` counts full blocks, `reuse_with_partial` also the partial last ones. `offered_load` is the prefill work
    without any cache divided by the time between the first and the last arrival: how many instances it would keep busy.
    It is there only with a `cost`; NaN where all arrive at once. `arrival_cv` is that of the session starts.
    """
    duration_s = _duration_s(played.arrival_ns)
    facts: dict[str, Any] = {
        "workload": name,
        "requests": len(played.arrival_ns),
        "sessions": played.sessions,
        "duration_s": duration_s,
        "rate_per_s": _ratio(len(played.arrival_ns), duration_s),
        "arrival_cv": _cv(played.starts_ns),
        "input_tokens": spread(played.input_tokens),
        "output_tokens": spread(played.output_tokens),
        "block_tokens": played.block_size,
        "reuse": _of_reuse(reuse(played)),
        "reuse_with_partial": _of_reuse(reuse(played, count_partial=True)),
    }
    if cost is not None:
        total_s = prefill_s(played, cost)
        facts["cost"] = cost.name
        facts["prefill_s"] = total_s
        facts["offered_load"] = _ratio(total_s, duration_s)
        facts["offered_load_with_infinite_cache"] = _ratio(_cached_prefill_s(played, cost), duration_s)
    return facts


def _ratio(value: float, by: float) -> float:
    return value / by if by > 0 else float("nan")


def _cached_prefill_s(played: Played, cost: CostModel) -> float:
    """The same work when every full block that was seen before is there."""
    full = played.block_tokens == played.block_size
    first = np.zeros(len(played.blocks), bool)
    seen_at = np.unique(np.where(full, played.blocks, -1), return_index=True)[1]
    first[seen_at] = True
    hits = np.bincount(played.request[full & ~first], minlength=len(played.input_tokens))
    total_ns = 0
    for length, blocks in zip(played.input_tokens.tolist(), hits.tolist(), strict=True):
        reused = min(blocks * played.block_size, length - 1)  # the last prompt token is always computed
        total_ns += cost.prefill_ns(reused, length - reused)
    return total_ns / NS_PER_S


def report(workload: Workload, cost: CostModel | None = None, block_tokens: int | None = None) -> tuple[Any, Any]:
    """`(rows, figure)`: lines `(what, value)` of a text table, and a `matplotlib.figure.Figure` to save or show."""
    from mcjax.workload.plots import picture

    played = play(workload, block_tokens)
    facts = of_played(played, workload.name, cost)
    return rows(facts), picture(played, facts)
