"""A run's figures computed again from its requests, each counted as often as its block of time was drawn.

Counted once each, they are those of `summary.json` (`docs/metrics.md` defines them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import cast

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import RunError
from mcjax.track.arrow import Table, arrow, compute
from mcjax.track.compare.blocks import Blocks, in_window, requests_of, warmup_ns
from mcjax.track.compare.order import BlockOrder
from mcjax.track.metrics import CATALOGUE
from mcjax.track.run import Run
from mcjax.track.statistics import PERCENTILES
from mcjax.track.summary import HIT_COLUMNS, REQUEST_COLUMNS, delivered
from mcjax.track.tables import chosen, integers
from mcjax.types import NS_PER_S, RequestState

Counts = NDArray[np.int64]
USUAL_BLOCKS = (16, 32, 64, 128, 256, 512, 1024)
"""Tokens of a block, where the config leaves them to the workload."""


class WeightedRun:
    """The figures of one run, or of its requests with one value of the column `by`, as functions of weights.

    `weights` are `[R, B]` counts, one row a resample, and the figures `[R]`, NaN where there is none.
    """

    def __init__(self, run: Run, blocks: Blocks | None = None, by: str = "", part: str = ""):
        self._run, self._by, self._part = run, by, part
        self._blocks = blocks
        self.count = blocks.count if blocks else 1
        self._window_ns = round(float(run.summary.get("window_s") or 0) * NS_PER_S)
        columns = [*REQUEST_COLUMNS, *([by] if by and by not in REQUEST_COLUMNS else [])]
        self._requests = self._own(run.columns("requests", *columns))
        self._index = self._index_of(self._requests)
        self._orders: dict[str, BlockOrder] = {}
        self._sums: dict[str, Counts] = {}

    def once(self, name: str) -> float | None:
        """The figure with every request counted once; None if it has none, or cannot be had from requests."""
        found = self.figures(name, np.ones((1, self.count), np.int64))
        return None if found is None or np.isnan(found[0]) else float(found[0])

    def figures(self, name: str, weights: Counts) -> NDArray[np.float64] | None:
        """`[R]`; None for a metric that requests do not tell."""
        if name in _SPREADS:
            group, _, part = name.partition(".")
            return self._spread(group, part, weights)
        found = _RATIOS.get(name)
        if name == "prefix_hit_rate.block":
            tokens = block_tokens_of(self._run)
            found = None if tokens is None else (f"hit_blocks {tokens}", f"prompt_blocks {tokens}", 1)
        if found is None:
            return None
        above, below, scale = found
        total = weights @ self._sum(above)
        if below == "":
            return total.astype(np.float64)
        whole = np.full(len(weights), self._window_ns) if below == "window" else weights @ self._sum(below)
        return _divided(total * scale, whole)

    def _spread(self, group: str, part: str, weights: Counts) -> NDArray[np.float64]:
        order = self._order(group)
        counts = weights @ order.sizes
        if part == "mean":
            return _divided(weights @ self._sum(group), counts * NS_PER_S)
        known = counts > 0
        found = np.full(len(weights), np.nan)
        if known.any():
            below, share = np.divmod(int(part[1:]) * (counts[known] - 1), 100)
            ranks = np.stack([below, np.minimum(below + 1, counts[known] - 1)], axis=1)
            low, high = order.at_ranks(weights[known], ranks).T
            found[known] = (low * (100 - share) + high * share) / (100 * NS_PER_S)
        return found

    def _order(self, group: str) -> BlockOrder:
        if group not in self._orders:
            if group == "tbt_s":
                pieces = list(self._intervals())
                none = np.zeros(0, np.int64)
                values, index = (np.concatenate([none, *(piece[side] for piece in pieces)]) for side in (0, 1))
            else:
                column = self._requests.column(f"{group.removesuffix('_s')}_ns")
                there = column.is_valid().to_numpy().astype(bool)
                values, index = column.drop_null().to_numpy().astype(np.int64), self._index[there]
            self._orders[group] = BlockOrder(values, index, self.count)
            self._sums[group] = _by_block(values, index, self.count)
        return self._orders[group]

    def _intervals(self) -> Iterator[tuple[Counts, Counts]]:
        for piece in self._run.pieces(
            "requests", "request_id", "arrival_ns", "intervals_ns", *([self._by] if self._by else [])
        ):
            own = self._own(piece)
            lengths = compute().list_value_length(own.column("intervals_ns")).to_numpy()
            values = compute().list_flatten(own.column("intervals_ns")).to_numpy()
            yield values, np.repeat(self._index_of(own), lengths)

    def _sum(self, name: str) -> Counts:
        """`[B]`: a quantity added up in each block."""
        if name not in self._sums:
            self._sums[name] = _by_block(_quantity(name, self._requests), self._index, self.count)
        return self._sums[name]

    def _own(self, table: Table) -> Table:
        table = in_window(table, warmup_ns(self._run))
        return table.filter(arrow().array(chosen(table, self._by, [self._part]))) if self._by else table

    def _index_of(self, table: Table) -> Counts:
        return np.zeros_like(integers(table, "arrival_ns")) if self._blocks is None else self._blocks.of(table)


_SPREADS = tuple(
    f"{group}.{part}"
    for group in ("ttft_s", "tbt_s", "tbt_tail_s")
    for part in ("mean", *(f"p{percent}" for percent in PERCENTILES))
)
_RATIOS: Mapping[str, tuple[str, str, int]] = {
    "requests.submitted": ("one", "", 1),
    **{f"requests.{state.value}": (state.value, "", 1) for state in RequestState},
    "slo_attainment": ("met", "one", 1),
    "goodput_rps": ("met", "window", NS_PER_S),
    "output_tokens_per_s": ("output", "window", NS_PER_S),
    "prefix_hit_rate.token": ("hit", "prompt", 1),
    **{f"tokens_by_tier.{tier}": (column, "", 1) for tier, column in HIT_COLUMNS.items()},
    "tokens_by_tier.computed": ("computed", "", 1),
    "hit_tokens.delivered": ("hit", "", 1),
}
"""Name: what is added up, what it is divided by ("" for nothing), and a factor."""


def of_requests(name: str) -> bool:
    """Whether requests alone tell this figure."""
    return name in _SPREADS or name in _RATIOS or name == "prefix_hit_rate.block"


def is_rate(name: str) -> bool:
    """Whether the figure is divided by the length of the run's window."""
    return name in _RATIOS and _RATIOS[name][1] == "window"


def _quantity(name: str, requests: Table) -> Counts:
    """`[N]`: what one request adds to a sum."""
    word, _, tokens = name.partition(" ")
    if word in [state.value for state in RequestState]:
        return chosen(requests, "state", [word]).astype(np.int64)
    if word == "one":
        return np.ones(len(requests), np.int64)
    if word == "met":
        return requests.column("met_slo").to_numpy().astype(np.int64)
    if word == "output":
        completed = chosen(requests, "state", [RequestState.COMPLETED.value])
        return np.where(completed, integers(requests, "output_tokens"), 0)
    started = integers(requests, "prefill_start_ns") >= 0
    if word in HIT_COLUMNS.values():
        return np.where(started, integers(requests, word), 0)
    prompt = np.where(started, integers(requests, "prompt_tokens"), 0)
    hit = np.where(started, delivered(requests), 0)
    size = int(tokens or 1)
    of_word: dict[str, Callable[[], Counts]] = {
        "prompt": lambda: prompt,
        "hit": lambda: hit,
        "computed": lambda: prompt - hit,
        "hit_blocks": lambda: -(-hit // size),
        "prompt_blocks": lambda: -(-prompt // size),
    }
    return of_word[word]()


def _by_block(values: Counts, index: Counts, blocks: int) -> Counts:
    sums = np.zeros(blocks, np.int64)
    np.add.at(sums, index, values)
    return sums


def _divided(part: Counts, whole: Counts) -> NDArray[np.float64]:
    return np.divide(part, whole, out=np.full(len(part), np.nan), where=whole != 0)


def block_tokens_of(run: Run) -> int | None:
    """The tokens of a block. No file says so where the workload decides: then it is what the summary agrees with."""
    expected = CATALOGUE["prefix_hit_rate.block"].of(run.summary)
    config = run.record.config
    told = [value for key, value in config.items() if key.endswith("block_tokens") and isinstance(value, int)]
    table = in_window(run.columns("requests", *REQUEST_COLUMNS), warmup_ns(run))
    for tokens in (*told, *USUAL_BLOCKS):
        hit, prompt = (int(_quantity(f"{what}_blocks {tokens}", table).sum()) for what in ("hit", "prompt"))
        if prompt and expected == hit / prompt:
            return tokens
    return None


def values_of(runs: Iterable[Run], column: str) -> list[str]:
    """The values of a request column, of all runs, in order. Raises `RunError` for a run without requests."""
    found: set[str] = set()
    for run in runs:
        table = requests_of(run, column)
        if table is None:
            raise RunError(f"{run.directory or 'a run in memory'}: its requests were not kept, and {column} is theirs")
        found.update(cast("list[str]", compute().unique(table.column(column)).to_pylist()))
    return sorted(found)
