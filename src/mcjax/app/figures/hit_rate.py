"""Prefix hits of a trace in one pool: its requests' blocks, one request at a time, through the real pool with LRU."""

from __future__ import annotations

from collections.abc import Sequence

from mcjax.app.figures import published
from mcjax.app.figures.row import Row
from mcjax.app.hit_rates.replay import chains_of, replay
from mcjax.kvpool.eviction.lru import LRU
from mcjax.kvpool.watermark.static import Static
from mcjax.workload.mooncake_file import Rows

TRACE_BLOCK_TOKENS = 512
"""Prompt tokens that an id of the published traces stands for."""


def hit_rate(rows: Rows, capacity_tokens: int, block_tokens: int = 256) -> float:
    """Share of all prompt tokens that an earlier request left in a pool of `capacity_tokens`, evicting by LRU.

    256 is the block size of FAST'25's experiments. A partial last block counts too, as in the papers' own replay; the
    simulator, and `experiment=fig9_hit_rate`, are stricter and share full blocks only. Of a prompt longer than the
    pool, the beginning is kept.
    """
    chains = chains_of(rows, TRACE_BLOCK_TOKENS, block_tokens, partial=True)
    return chains.hit_rate(replay(chains, capacity_tokens // block_tokens, LRU(), Static()))


def capacity_rows(name: str, rows: Rows, capacities: Sequence[int] = published.CAPACITIES) -> list[Row]:
    """A3: hits over the pool's capacity, of the published points those at `capacities`."""
    made: list[Row] = []
    for capacity in capacities:
        rate = published.LRU_HIT_RATES[name][published.CAPACITIES.index(capacity)]
        label = f"{name}: LRU, {capacity / 1e6:g} M tokens"
        made.append(Row("A3", label, 100 * rate, 100 * hit_rate(rows, capacity), "%"))
    return made


def endless_row(name: str, rows: Rows) -> Row:
    """A2: hits in a pool that never evicts."""
    ours = hit_rate(rows, sum(rows.input_tokens) + len(rows) * TRACE_BLOCK_TOKENS)
    return Row("A2", f"{name}: endless pool", published.MAX_HIT_RATES[name] * 100, ours * 100, "%", WHY[name])


WHY = {
    "conversation": (
        "the public ids stand for 512 tokens: where two prompts part inside an id, the paper's 256-token blocks still "
        "share one. Nearly every prompt here has such a place, the end of the system prompt, so the gap is nearly "
        "constant (3 to 4 points)"
    ),
    "synthetic": "the public ids stand for 512 tokens: what two prompts share inside the id where they part is lost",
}
