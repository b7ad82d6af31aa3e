"""What is fixed about a call of the TPU's prefill before it runs: shapes, blocks, what they take of the memories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mcjax.cost.kernels import AttentionShape, KernelCost, prefill_cost
from mcjax.errors import KernelRefused
from mcjax.kernels.pages import LARGEST, KVPages
from mcjax.kernels.prefill.tpu_pages import RING
from mcjax.kernels.prefill.tpu_schedule import most_blocks, most_pieces
from mcjax.kernels.target import Target
from mcjax.kernels.tuning import tuning
from mcjax.kernels.vmem import require_vmem, tiled_bytes

SMEM_BYTES = 2**20
"""Scalar memory of a TPU core, v5e and v6e: the page table and the lists of blocks are in it."""

SMEM_SPARE_BYTES = 16 * 2**10
"""What the compiler keeps of it for itself."""

LANES = 128


@dataclass(frozen=True)
class Plan:
    """Static numbers of one call."""

    tokens: int
    """Rows of queries, `query_tokens` or more."""
    heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    table_pages: int
    sequences: int
    dtype: Any
    """Of queries and results."""
    kv_dtype: Any
    quantised: bool
    window: int | None
    soft_cap: float | None
    scale: float
    query_tokens: int
    key_tokens: int
    tile_tokens: int
    vmem_limit_bytes: int = 0

    @property
    def group(self) -> int:
        """Query heads a key head."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Of a block of queries, as one key head sees them."""
        return self.query_tokens * self.group

    @property
    def tile_rows(self) -> int:
        return self.tile_tokens * self.group

    @property
    def block_pages(self) -> int:
        return self.key_tokens // self.page_tokens

    @property
    def piece_tokens(self) -> int:
        """Of the pieces in which pages are written: a tile of the narrowest numbers, or a page."""
        return min(self.page_tokens, 32)

    @property
    def product_dtype(self) -> Any:
        """What queries, keys, weights and values are multiplied as."""
        return jnp.dtype(self.dtype) if self.quantised else jnp.promote_types(self.dtype, self.kv_dtype)

    @property
    def converts(self) -> bool:
        """Whether keys and values are multiplied as another dtype than the pages'."""
        return self.product_dtype != self.kv_dtype

    @property
    def scratch(self) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        """Shape and dtype of each array that the attention kernel keeps in VMEM."""
        token = (self.heads, self.head_dim)
        pages = (2, self.block_pages, 2, self.kv_heads, self.page_tokens)
        state = (self.kv_heads, self.rows)
        found = {
            "arriving": ((2, self.query_tokens, *token), self.dtype),
            "leaving": ((2, self.query_tokens, *token), self.dtype),
            "wide": ((self.tile_tokens, *token), jnp.float32),
            "grouped": ((*state, self.head_dim), self.product_dtype),
            "peak": ((*state, LANES), jnp.float32),
            "total": ((*state, LANES), jnp.float32),
            "mixed": ((*state, self.head_dim), jnp.float32),
            "pages": ((*pages, self.head_dim), self.kv_dtype),
        }
        if self.converts:
            found["converted"] = ((2, self.kv_heads, self.key_tokens, self.head_dim), self.product_dtype)
        if self.quantised:
            found["scales"] = (pages, jnp.float32)
            found["scale_rows"] = ((2, self.kv_heads, 1, self.key_tokens), jnp.float32)
        return found

    @property
    def vmem_parts(self) -> dict[str, int]:
        """Bytes of VMEM by what they are for: the attention kernel's arrays, and what its sums pass through."""
        parts = {name: tiled_bytes(shape, dtype) for name, (shape, dtype) in self.scratch.items()}
        scores = tiled_bytes((self.tile_rows, self.key_tokens), jnp.float32)
        parts["scores and weights"] = 4 * scores
        parts["keys and values in use"] = 4 * tiled_bytes((self.key_tokens, self.head_dim), jnp.float32)
        parts["results in use"] = 4 * tiled_bytes((self.tile_rows, self.head_dim), jnp.float32)
        return parts

    @property
    def smem_bytes(self) -> int:
        """Of scalar memory: the page table and the list of blocks; or, in the other kernel, the list of pieces."""
        blocks = most_blocks(self.tokens, self.sequences, self.query_tokens)
        pieces = most_pieces(self.tokens, self.sequences, self.piece_tokens)
        return 4 * max(self.sequences * self.table_pages + 4 * blocks, 4 * pieces)

    @property
    def write_bytes(self) -> int:
        """VMEM of the kernel that writes pages."""
        piece = tiled_bytes((2, self.kv_heads, self.piece_tokens, self.head_dim), self.kv_dtype)
        scales = tiled_bytes((2, self.kv_heads, self.page_tokens), jnp.float32)
        return (2 * RING + 4) * max(piece, scales)

    @property
    def cost(self) -> KernelCost:
        """At the static bound: one sequence that fills its table with all new tokens."""
        shape = AttentionShape(
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.page_tokens,
            jnp.dtype(self.dtype).itemsize,
            jnp.dtype(self.kv_dtype).itemsize,
            4 if self.quantised else 0,
            self.window,
            self.soft_cap is not None,
        )
        prefix = max(0, self.table_pages * self.page_tokens - self.tokens)
        return prefill_cost(shape, [(prefix, self.tokens)])


def plan_of(
    queries: Float[Array, "T H D"],
    pages: KVPages,
    page_table: Int[Array, "B N"],
    *,
    window: int | None,
    soft_cap: float | None,
    scale: float | None,
    target: Target,
    query_tokens: int | None,
    key_tokens: int | None,
    tile_tokens: int | None,
) -> Plan:
    """The plan of a call of `tpu.prefill`. Raises `KernelRefused`."""
    tokens, heads, head_dim = queries.shape
    page = pages.page_tokens
    kv_dtype = pages.data.dtype
    if page & (page - 1):
        raise KernelRefused("prefill", f"pages of {page} tokens on a TPU", "take a power of two: 16 to 512")
    use = tuning("mcjax.kernels.prefill", "tuning_tpu.json").find(
        platform="tpu",
        kind=target.kind,
        head_dim=head_dim,
        kv_heads=pages.kv_heads,
        group=heads // pages.kv_heads,
        page_tokens=page,
        dtype=jnp.dtype(queries.dtype).name,
        kv_dtype=jnp.dtype(kv_dtype).name,
        tokens=tokens,
    )
    query_tokens = query_tokens or min(use["query_tokens"], max(16, _power_below(tokens)))
    tile_tokens = min(tile_tokens or use["tile_tokens"], query_tokens)
    table_tokens = page_table.shape[1] * page
    key_tokens = max(key_tokens or min(use["key_tokens"], _power_above(table_tokens)), page)
    for name, value in (("query_tokens", query_tokens), ("tile_tokens", tile_tokens), ("key_tokens", key_tokens)):
        if value & (value - 1):
            raise KernelRefused("prefill", f"{name}={value}", "take a power of two")
    plan = Plan(
        max(tokens, query_tokens),
        heads,
        pages.kv_heads,
        head_dim,
        page,
        page_table.shape[1],
        page_table.shape[0],
        jnp.dtype(queries.dtype),
        jnp.dtype(kv_dtype),
        jnp.dtype(kv_dtype).name in LARGEST,
        window,
        soft_cap,
        head_dim**-0.5 if scale is None else scale,
        query_tokens,
        key_tokens,
        tile_tokens,
    )
    if plan.smem_bytes > SMEM_BYTES - SMEM_SPARE_BYTES and not target.interpret:
        problem = (
            f"{plan.sequences} sequences of {plan.table_pages} pages and {tokens} tokens need "
            f"{plan.smem_bytes:,} bytes of scalar memory, and a core has {SMEM_BYTES - SMEM_SPARE_BYTES:,}"
        )
        raise KernelRefused("prefill", problem, "take larger pages, or fewer sequences a call")
    parts = max(plan.vmem_parts, {"pieces of pages": plan.write_bytes}, key=lambda parts: sum(parts.values()))
    needed = require_vmem("prefill", parts, target, "query_tokens, key_tokens or tile_tokens")
    return replace(plan, vmem_limit_bytes=needed)


def _power_above(value: int) -> int:
    """The smallest power of two that is not below it."""
    return 1 << (value - 1).bit_length()


def _power_below(value: int) -> int:
    """The largest power of two that is not above it."""
    return 1 << (value.bit_length() - 1)
