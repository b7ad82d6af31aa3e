"""Query blocks of a ragged batch: what each program of the GPU bodies does. Small, made by XLA in the same call."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

SEQUENCE, FIRST_ROW, ROWS, FIRST_POSITION, KEYS = range(5)
"""What the table of blocks says of each: its sequence, its first row, how many rows, its first row's position, and how
many keys there are up to its last row's position (0: none to be seen)."""


def blocks_of(
    starts: Int[Array, " B"], lengths: Int[Array, " B"], prefixes: Int[Array, " B"], rows: int, tokens: int
) -> Int[Array, "5 X"]:
    """A table of `X` blocks of at most `tokens` neighbouring rows. No block crosses from one sequence into another.

    Every row is in exactly one block: rows of no sequence are in blocks without keys, so that their results, which are
    zeros, are written as all others are. Blocks beyond the real ones have no rows.

    The last block of each sequence, which has the most keys, comes before its others: what takes longest begins first.
    """
    batch = starts.shape[0]
    present = lengths > 0
    ends = starts + lengths
    # Rows of nobody: before all sequences, and after each up to whichever begins next. Few sequences: all pairs.
    begins = jnp.where(present, starts, rows)
    befores = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.where(present, ends, rows)])
    following = jnp.where(begins[None, :] >= befores[:, None], begins[None, :], rows).min(axis=1)
    gaps = jnp.where(befores < rows, following - befores, 0)
    first = jnp.concatenate([starts, befores])
    size = jnp.concatenate([lengths, gaps])
    position = jnp.concatenate([prefixes, jnp.zeros(batch + 1, jnp.int32)])
    needed = (size + tokens - 1) // tokens
    until = jnp.cumsum(needed)
    most = (rows + (2 * batch + 1) * (tokens - 1)) // tokens
    index = jnp.arange(most, dtype=jnp.int32)
    segment = jnp.minimum((until[None, :] <= index[:, None]).sum(axis=1), 2 * batch)
    back = until[segment] - 1 - index  # of the segment's blocks, the last one first
    row = jnp.maximum(back, 0) * tokens
    count = jnp.where(index < until[-1], jnp.clip(size[segment] - row, 0, tokens), 0)
    at = position[segment] + row
    sees = (segment < batch) & (count > 0)
    columns = (
        jnp.where(sees, segment, 0),
        jnp.where(count > 0, first[segment] + row, 0),
        count,
        jnp.where(sees, at, 0),
        jnp.where(sees, at + count, 0),
    )
    return jnp.stack(columns).astype(jnp.int32)


def places_of(
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    prefixes: Int[Array, " B"],
    page_table: Int[Array, "B N"],
    rows: int,
    page_tokens: int,
    pages: int,
) -> Int[Array, "2 T"]:
    """The page and offset of each row's new key and value; page `pages`, which is none, for rows of no sequence."""
    row = jnp.arange(rows, dtype=jnp.int32)
    owned = (row >= starts[:, None]) & (row < (starts + lengths)[:, None])  # [B, T]
    owner = jnp.argmax(owned, axis=0)
    position = jnp.where(owned.any(axis=0), prefixes[owner] + row - starts[owner], -1)
    page = page_table[owner, jnp.maximum(position, 0) // page_tokens]
    return jnp.stack([jnp.where(position < 0, pages, page), position % page_tokens]).astype(jnp.int32)
