"""What a ragged batch means for a kernel with static shapes: lists of blocks of queries and of pieces of pages.

Computed by XLA inside the call, from a few integers a sequence. The lists are as long as the worst batch of that shape
needs; a kernel goes through their beginning only, as far as the counts say.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


class QueryBlocks(NamedTuple):
    """Blocks of rows, each of one sequence; behind them those of rows of nobody. `X` blocks at most."""

    sequence: Int[Array, " X"]
    row: Int[Array, " X"]
    """The first."""
    rows: Int[Array, " X"]
    position: Int[Array, " X"]
    """Of the first row, in its sequence; 0 for rows of nobody."""
    owned: Int[Array, ""]
    """So many blocks belong to sequences."""
    total: Int[Array, ""]
    """So many blocks are there."""


class PagePieces(NamedTuple):
    """Pieces of pages that get new tokens: aligned, of one size, each of one page. `W` pieces at most."""

    page: Int[Array, " W"]
    offset: Int[Array, " W"]
    """Of the piece's first token in its page."""
    least: Int[Array, " W"]
    """The first new token within the piece."""
    until: Int[Array, " W"]
    rows: Int[Array, "W size"]
    """Where each token of the piece is new: the row of it. Elsewhere: any row."""
    total: Int[Array, ""]
    """So many pieces are there."""


def most_blocks(tokens: int, sequences: int, block_tokens: int) -> int:
    """Blocks that the sequences, and the gaps before, between and behind them, can come to: each may end in a short
    one."""
    return tokens // block_tokens + 2 * sequences + 1


def most_pieces(tokens: int, sequences: int, piece_tokens: int) -> int:
    """Pieces that new tokens can touch: a sequence may begin and end within one; each has one token or more."""
    return max(1, min(tokens, tokens // piece_tokens + 2 * sequences))


def query_blocks(
    starts: Int[Array, " B"], lengths: Int[Array, " B"], prefixes: Int[Array, " B"], tokens: int, block_tokens: int
) -> QueryBlocks:
    """All `tokens` rows in blocks of `block_tokens` or fewer."""
    sequences = starts.shape[0]
    begins = jnp.where(lengths > 0, starts, tokens)
    ordered = jnp.sort(begins)
    ends = jnp.sort(jnp.where(lengths > 0, starts + lengths, tokens))  # sequences do not overlap: the same order
    edge = jnp.zeros(1, jnp.int32)
    gap_begins = jnp.concatenate([edge, ends])
    gap_sizes = jnp.concatenate([ordered, edge + tokens]) - gap_begins
    begins = jnp.concatenate([begins, gap_begins])
    sizes = jnp.concatenate([lengths, gap_sizes])
    positions = jnp.concatenate([prefixes, jnp.zeros(sequences + 1, jnp.int32)])
    blocks = -(-sizes // block_tokens)
    until = jnp.cumsum(blocks)
    index = jnp.arange(most_blocks(tokens, sequences, block_tokens))
    part = _part_of(index, until)
    before = (index - (until - blocks)[part]) * block_tokens
    rows = jnp.clip(sizes[part] - before, 0, block_tokens)
    sequence = jnp.minimum(part, sequences - 1)
    return QueryBlocks(sequence, begins[part] + before, rows, positions[part] + before, until[sequences - 1], until[-1])


def page_pieces(
    page_table: Int[Array, "B N"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    prefixes: Int[Array, " B"],
    tokens: int,
    page_tokens: int,
    piece_tokens: int,
) -> PagePieces:
    """The pieces of `piece_tokens` (a divisor of `page_tokens`) that the new tokens lie in."""
    first = prefixes // piece_tokens
    pieces = jnp.where(lengths > 0, (prefixes + lengths - 1) // piece_tokens - first + 1, 0)
    until = jnp.cumsum(pieces)
    index = jnp.arange(most_pieces(tokens, starts.shape[0], piece_tokens))
    part = _part_of(index, until)
    position = (first[part] + index - (until - pieces)[part]) * piece_tokens
    within = prefixes[part] - position
    rows = starts[part][:, None] + jnp.arange(piece_tokens) - within[:, None]
    return PagePieces(
        page_table[part, position // page_tokens],
        position % page_tokens,
        jnp.maximum(within, 0),
        jnp.minimum(within + lengths[part], piece_tokens),
        jnp.clip(rows, 0, tokens - 1),
        until[-1],
    )


def _part_of(index: Int[Array, " X"], until: Int[Array, " Y"]) -> Int[Array, " X"]:
    """The part whose range, ending before `until`, each index falls in; the last one for those behind."""
    return jnp.minimum((index[:, None] >= until).sum(axis=1), until.shape[0] - 1)
