"""How the GPU's decode is cut up: parts of contexts, pieces of work, tiles; known at compile time or found on the card.

All of it follows from shapes, and from a row's own lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from mcjax.kernels.target import Target
from mcjax.kernels.tuning import tuning


@dataclass(frozen=True, slots=True)
class Blocks:
    """What may be tuned, and changes nothing but speed and the last bits."""

    key_tile: int
    """Keys a step, a power of two from 16 on."""
    row_tile: int
    """Query vectors a block at most, a power of two from 16 on; more of them read the keys again."""
    least_tokens: int
    """Of a part, while there are enough parts for all blocks; a multiple of `key_tile`."""
    most_tokens: int
    """Of a part; a multiple of `key_tile`."""
    blocks: int
    """How many run: as many as the card holds at once."""
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What of one call is known when it is compiled."""

    batch: int
    width: int
    """Query tokens a row."""
    kv_heads: int
    groups: int
    """Query heads of one key head."""
    head_dim: int
    page_tokens: int
    page_vectors: int
    """Of all layers, heads, keys and values of a page."""
    table_tokens: int
    sharded: bool
    """Whether tables begin at the positions in `firsts`, and not at 0."""
    page_dtype: Any
    window: int | None
    soft_cap: float | None
    scale: float
    compute_dtype: Any
    """Of what is multiplied."""
    blocks: Blocks
    interpret: bool

    @property
    def rows(self) -> int:
        """Query vectors of a key head."""
        return self.width * self.groups

    @property
    def row_tile(self) -> int:
        return min(max(pl.next_power_of_2(self.rows), 16), self.blocks.row_tile)

    @property
    def row_tiles(self) -> int:
        return pl.cdiv(self.rows, self.row_tile)

    @property
    def kept_rows(self) -> int:
        """Of a tile, those that hold anything: what a piece leaves behind."""
        return min(self.rows, self.row_tile)

    @property
    def lanes(self) -> int:
        """Numbers of a vector that are read as one: tensor cores take theirs from words of 16 bits or more."""
        return 2 if self.page_dtype.itemsize == 1 else 1

    @property
    def words(self) -> int:
        """Of a vector, as many as are worked on."""
        return max(pl.next_power_of_2(self.head_dim // self.lanes), 16)

    @property
    def pieces(self) -> int:
        """Of work, of a part of a row."""
        return self.kv_heads * self.row_tiles

    @property
    def wanted_parts(self) -> int:
        """Of a row, to give every block two pieces if all rows were alike."""
        return pl.cdiv(2 * self.blocks.blocks, self.batch * self.pieces)

    @property
    def most_parts(self) -> int:
        """That any row can have."""
        seen = self.table_tokens if self.window is None else min(self.table_tokens, self.window + self.width - 1)
        sizes = (self.blocks.most_tokens, self.blocks.least_tokens)
        return max(pl.cdiv(seen, sizes[0]), min(pl.cdiv(seen, sizes[1]), self.wanted_parts))

    def seen(self, contexts: Array, lengths: Array, firsts: Array) -> tuple[Array, Array]:
        """The first key of the table that a query of a row sees, and the first one that none does; of any shape."""
        stop = jnp.where(lengths > 0, jnp.clip(contexts - firsts, 0, self.table_tokens), 0)
        if self.window is None:
            return jnp.zeros_like(stop), stop
        return jnp.clip(contexts - lengths + 1 - self.window - firsts, 0, stop), stop

    def parts(self, tokens: Array) -> tuple[Array, Array]:
        """How many parts so many visible keys are cut into, none of them empty, and the keys of each but the last."""
        enough = jnp.minimum(rounded_up(tokens, self.blocks.least_tokens), self.wanted_parts)
        wanted = jnp.maximum(jnp.maximum(enough, rounded_up(tokens, self.blocks.most_tokens)), 1)
        each = jnp.maximum(rounded_up(rounded_up(tokens, self.blocks.key_tile), wanted), 1) * self.blocks.key_tile
        return rounded_up(tokens, each), each


def tuned(target: Target, head_dim: int, dtype: Any, rows: int, compute_dtype: Any = jnp.bfloat16) -> Blocks:
    """The blocks for a case, of `rows` query vectors a key head and pages of `dtype`."""
    found = tuning("mcjax.kernels.decode", "tuning_gpu.json").find(
        kind=target.kind,
        head_dim=head_dim,
        number_bytes=jnp.dtype(dtype).itemsize,
        rows=rows,
        wide=compute_dtype == jnp.float32,
    )
    return Blocks(**found)


def rounded_up(count: Any, size: Any) -> Any:
    """Rounded up, of what is not negative: a plain division, where `//` would look at signs."""
    return lax.div(count + (size - 1), jnp.full_like(count, size) if isinstance(size, int) else size)
