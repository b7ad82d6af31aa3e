"""Paged attention in plain XLA, a block of keys at a time: time and memory follow the context in use.

Blocks are the same for every row and call, and a block that a query cannot see leaves its state untouched, bit for bit.
So the loops may stop at the longest context of the batch, and begin where the earliest window does, and each row's bits
still depend on its own keys and values only.
Source of the running softmax: Milakov and Gimelshein 2018 (arXiv:1805.02867).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from mcjax.kernels.attention.pages import read, sizes
from mcjax.kernels.attention.reference import MASKED_SCORE
from mcjax.kernels.choice import Layout

# All sizes were measured on two x86 cores: see docs/kernels-xla.md.
DECODE_BLOCKS = ((4, 128), (None, 256))
"""(blocks, keys in each): small ones first, for short contexts; then larger ones, of which a long context needs few."""
CHUNK_BLOCKS = ((None, 256),)
TILE_TOKENS = 256
"""Tokens of a chunk that look at a block together. A tile that ends before a block does not look at it."""
MERGED_TOKENS = 4
"""Up to so many tokens a row, queries meet whole cache entries: see `_Heads`."""

State: TypeAlias = tuple[Array, Array, Array]
"""Of each query: largest score so far and sum of weights, `[.., B, X, R]`; weighted values `[.., B, X, R, E]`."""


def paged_attention(
    queries: Float[Array, "B T H D"],
    pages: Shaped[Array, "P L C ..."],
    layer: int,
    page_table: Int[Array, "B N"],
    positions: Int[Array, "B T"],
    layout: Layout = "tokens_first",
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
) -> Float[Array, "B T H D"]:
    """Same contract as `reference.paged_attention`; differs from it in the last bits only."""
    batch, steps, heads, head_dim = queries.shape
    page_tokens, kv_heads = sizes(pages, layout)
    width = min(steps, TILE_TOKENS)
    tiles = -(-steps // width)
    filler = (0, tiles * width - steps)
    tiled_queries = jnp.pad(queries, ((0, 0), filler, (0, 0), (0, 0))).reshape(batch, tiles, width, heads, head_dim)
    tiled_positions = jnp.pad(positions, ((0, 0), filler), constant_values=-1).reshape(batch, tiles, width)
    arranged = _Heads(
        kv_heads, heads // kv_heads, head_dim, head_dim**-0.5 if scale is None else scale, merged=steps <= MERGED_TOKENS
    )
    rows = arranged.queries(tiled_queries)
    row_positions = arranged.positions(tiled_positions)
    tile_last = tiled_positions.max(axis=(0, 2))  # [tiles]
    tile_first = _seen_from(tiled_positions, window).min(axis=(0, 2))
    last = positions.max(axis=1)  # [B]
    first = _seen_from(positions, window).min(axis=1)

    state: State = (
        jnp.full(rows.shape[:-1], MASKED_SCORE, jnp.float32),
        jnp.zeros(rows.shape[:-1], jnp.float32),
        jnp.zeros(rows.shape, jnp.float32),
    )
    look_at = partial(_look, window=window, soft_cap=soft_cap)
    plan = list(_plan(page_table.shape[1], page_tokens, DECODE_BLOCKS if steps == 1 else CHUNK_BLOCKS))
    # Entries added here are never seen: their positions lie beyond the context that the table holds.
    table_width = max(begin + count * size for begin, count, size in plan)
    page_table = jnp.pad(page_table, ((0, 0), (0, table_width - page_table.shape[1])))

    for first_page, count, block_pages in plan:

        def block(index: Array, state: State, first_page: int = first_page, block_pages: int = block_pages) -> State:
            page = first_page + index * block_pages
            table = jax.lax.dynamic_slice_in_dim(page_table, page, block_pages, axis=1)
            keys, values = read(pages, layer, table, layout)
            start = page * page_tokens
            key_positions = start + jnp.arange(block_pages * page_tokens, dtype=positions.dtype)
            # A weight of zero does not silence a NaN value (0 * NaN is NaN): the value itself must go.
            seen = (key_positions <= last[:, None]) & (key_positions >= first[:, None])
            values = arranged.entries(jnp.where(seen[..., None, None], values, 0))
            keys = values if pages.shape[2] == 1 else arranged.entries(keys)

            def look(tile: Array | int, state: State) -> State:
                peak, total, mixed = state
                before = (peak[tile], total[tile], mixed[tile])
                after = look_at(rows[tile], row_positions[tile], before, keys, values, key_positions)
                return peak.at[tile].set(after[0]), total.at[tile].set(after[1]), mixed.at[tile].set(after[2])

            if tiles == 1:
                return look(0, state)
            looks = (tile_last >= start) & (tile_first <= key_positions[-1])
            return jax.lax.fori_loop(jnp.argmax(looks), tiles - jnp.argmax(looks[::-1]), look, state)

        # A batch of padding has last = -1: no block at all.
        needed = last.max() // page_tokens + 1 - first_page
        passed = (first.min() // page_tokens - first_page) // block_pages
        begin, end = (jnp.clip(index, 0, count) for index in (passed, -(-needed // block_pages)))
        state = jax.lax.fori_loop(begin, end, block, state)

    _, total, mixed = state
    # The largest score of a valid row has weight exp(0) = 1, so its total is at least 1; only padding has none.
    mixed = arranged.unpacked(mixed / jnp.where(total > 0, total, 1)[..., None], width)
    return mixed.reshape(batch, tiles * width, heads, head_dim)[:, :steps].astype(queries.dtype)


def _seen_from(positions: Int[Array, "*X"], window: int | None) -> Int[Array, "*X"]:
    """The first key that a query sees, or one before all; of padding, one behind all."""
    if window is None:
        return jnp.zeros_like(positions)
    return jnp.where(positions >= 0, positions - (window - 1), jnp.iinfo(positions.dtype).max)


def _plan(
    table_pages: int, page_tokens: int, sizes: tuple[tuple[int | None, int], ...]
) -> Iterator[tuple[int, int, int]]:
    """(first page, blocks, pages a block) of each loop, until the table is covered."""
    first = 0
    for count, tokens in sizes:
        if first >= table_pages:
            return
        block_pages = min(-(-tokens // page_tokens), table_pages - first)
        needed = -(-(table_pages - first) // block_pages)
        count = needed if count is None else min(count, needed)
        yield first, count, block_pages
        first += count * block_pages


def _look(
    queries: Float[Array, "B X R E"],
    row_positions: Int[Array, "B 1 R"],
    state: State,
    keys: Float[Array, "B X S E"],
    values: Float[Array, "B X S E"],
    key_positions: Int[Array, " S"],
    window: int | None,
    soft_cap: float | None,
) -> State:
    """The state of some queries after one more block."""
    peak, total, mixed = state
    precision = jax.lax.Precision.HIGHEST if keys.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    visible = key_positions <= row_positions[..., None]  # [B, 1, R, S]
    sees = row_positions >= key_positions[0]
    if window is not None:
        visible &= key_positions > row_positions[..., None] - window
        sees &= key_positions[-1] > row_positions - window
    scores = jnp.einsum("bxre,bxse->bxrs", queries, keys, precision=precision, preferred_element_type=jnp.float32)
    if soft_cap is not None:
        scores = jnp.tanh(scores / soft_cap) * soft_cap
    scores = jnp.where(visible, scores, MASKED_SCORE)
    higher = jnp.maximum(peak, scores.max(axis=-1))
    weights = jnp.where(visible, jnp.exp(scores - higher[..., None]), 0)
    shrink = jnp.exp(peak - higher)
    added = jnp.einsum(
        "bxrs,bxse->bxre",
        weights.astype(values.dtype),
        values,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return (
        jnp.where(sees, higher, peak),
        jnp.where(sees, total * shrink + weights.sum(axis=-1), total),
        jnp.where(sees[..., None], mixed * shrink[..., None] + added, mixed),
    )


@dataclass(frozen=True, slots=True)
class _Heads:
    """How heads are laid out for the products: X groups of R queries, which meet entries of E numbers.

    Grouped: X = Hkv, R = G T, E = D, and keys and values are transposed once a block. With few queries that costs more
    than it saves. Merged: X = 1, R = H T, E = Hkv D: a query is zero outside its own key head, so it may meet cache
    entries as they lie.
    """

    kv_heads: int
    groups: int
    head_dim: int
    scale: float
    merged: bool

    def queries(self, queries: Float[Array, "B tiles T H D"]) -> Float[Array, "tiles B X R E"]:
        batch, tiles, width = queries.shape[:3]
        # Scaled here, and not the scores, of which there are more.
        scaled = queries.astype(jnp.float32) * self.scale
        grouped = scaled.astype(queries.dtype).reshape(batch, tiles, width, self.kv_heads, self.groups, self.head_dim)
        grouped = jnp.transpose(grouped, (1, 0, 3, 4, 2, 5))  # [tiles, B, Hkv, G, T, D]
        if not self.merged:
            return grouped.reshape(tiles, batch, self.kv_heads, self.groups * width, self.head_dim)
        own = jnp.eye(self.kv_heads, dtype=bool)[:, None, None, :, None]  # [Hkv, 1, 1, Hkv, 1]
        spread = jnp.where(own, grouped[..., None, :], 0)
        return spread.reshape(tiles, batch, 1, -1, self.kv_heads * self.head_dim)

    def positions(self, positions: Int[Array, "B tiles T"]) -> Int[Array, "tiles B 1 R"]:
        copies = self.groups * (self.kv_heads if self.merged else 1)
        return jnp.tile(jnp.swapaxes(positions, 0, 1), (1, 1, copies))[:, :, None]

    def entries(self, entries: Float[Array, "B S Hkv D"]) -> Float[Array, "B X S E"]:
        if self.merged:
            return entries.reshape(*entries.shape[:2], -1)[:, None]
        return jnp.swapaxes(entries, 1, 2)

    def unpacked(self, mixed: Float[Array, "tiles B X R E"], width: int) -> Float[Array, "B tiles T Hkv G D"]:
        tiles, batch = mixed.shape[:2]
        if self.merged:
            split = mixed.reshape(tiles, batch, self.kv_heads, self.groups, width, self.kv_heads, self.head_dim)
            grouped = jnp.stack([split[:, :, head, :, :, head] for head in range(self.kv_heads)], axis=2)
        else:
            grouped = mixed.reshape(tiles, batch, self.kv_heads, self.groups, width, self.head_dim)
        return jnp.transpose(grouped, (1, 0, 4, 2, 3, 5))
