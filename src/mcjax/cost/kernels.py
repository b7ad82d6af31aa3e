"""FLOPs and bytes of one call of each kernel, for a ragged batch. Exact integers, free of jax.

The one formula of each: `pl.CostEstimate` takes it, the simulator's roofline, and `mcjax kernels`. Left out are page
tables and lengths (4 bytes a page, against kilobytes), scalings (of scores, of quantised numbers) and what a body adds
of its own, such as merging the parts of a split context. Sequences that share pages read each their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LOGARITHM_BYTES = 4
"""Of the logarithm of a softmax's sum, float32, which decode writes for each query and head."""


@dataclass(frozen=True, slots=True)
class KernelCost:
    """Work of one call. A multiply-add is 2 FLOPs; bytes are those that must cross the device's memory once."""

    flops: int
    read_bytes: int
    written_bytes: int
    exponentials: int = 0
    """Of softmax and soft cap."""

    def __add__(self, other: KernelCost) -> KernelCost:
        return KernelCost(
            self.flops + other.flops,
            self.read_bytes + other.read_bytes,
            self.written_bytes + other.written_bytes,
            self.exponentials + other.exponentials,
        )

    def times(self, count: int) -> KernelCost:
        return KernelCost(
            self.flops * count, self.read_bytes * count, self.written_bytes * count, self.exponentials * count
        )

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention on one device."""

    heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    dtype_bytes: int = 2
    """Of queries, new keys and values, results."""
    kv_dtype_bytes: int = 2
    """Of a number in the pages."""
    scale_bytes: int = 0
    """Of the scale of each stored vector: 4 where pages are quantised."""
    window: int | None = None
    soft_cap: bool = False
    entries: int = 2
    """Vectors stored of a token and key head: 1 where keys are the values too (latents)."""
    value_dim: int = 0
    """Numbers of a value that are summed up; 0: `head_dim`."""

    @property
    def pair_flops(self) -> int:
        return pair_flops(self.heads, self.head_dim, self.value_dim or self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Of one token's stored keys and values."""
        return stored_token_bytes(self.kv_heads, self.head_dim, self.kv_dtype_bytes, self.scale_bytes, self.entries)

    @property
    def query_bytes(self) -> int:
        """Of one token's queries, and of its results."""
        return self.heads * self.head_dim * self.dtype_bytes

    @property
    def new_token_bytes(self) -> int:
        """Of one token's keys and values before they are stored."""
        return stored_token_bytes(self.kv_heads, self.head_dim, self.dtype_bytes, entries=self.entries)


def stored_token_bytes(
    kv_heads: int, head_dim: int, kv_dtype_bytes: int, scale_bytes: int = 0, entries: int = 2
) -> int:
    """Of one token's stored keys and values in one layer; `entries`: 1 where one vector is both."""
    return entries * kv_heads * (head_dim * kv_dtype_bytes + scale_bytes)


def pair_flops(heads: int, head_dim: int, value_dim: int | None = None) -> int:
    """Scores and weighted values of one query token over one key token, all heads of one layer.

    `value_dim`: numbers of a value, if other than of a key.
    """
    return 2 * heads * (head_dim + (head_dim if value_dim is None else value_dim))


def visible_pairs(context: int, new: int, window: int | None) -> int:
    """Query-key pairs of the last `new` of `context` tokens: each query sees its position and what is before it."""
    before = context - new
    if window is None or window >= context:
        return new * before + new * (new + 1) // 2
    ramp = min(max(window - before, 0), new)  # queries that see fewer than `window` keys
    return ramp * before + ramp * (ramp + 1) // 2 + (new - ramp) * window


def keys_read(context: int, new: int, window: int | None) -> int:
    """Keys that at least one of the last `new` of `context` tokens sees; 0 without new tokens."""
    if new == 0:
        return 0
    return context if window is None else min(context, new + window - 1)


def prefill_cost(shape: AttentionShape, sequences: Sequence[tuple[int, int]], tokens: int | None = None) -> KernelCost:
    """Of sequences of (prefix, new tokens): everything visible is read once, new tokens are written.

    `tokens` are the rows of the batch, which get results whether they belong to a sequence or not (default: all do).
    """
    total = KernelCost(0, 0, 0)
    real = 0
    for prefix, new in sequences:
        real += new
        cached = keys_read(prefix + new, new, shape.window) - new
        total += KernelCost(
            flops=visible_pairs(prefix + new, new, shape.window) * shape.pair_flops,
            read_bytes=new * (shape.query_bytes + shape.new_token_bytes) + cached * shape.token_bytes,
            written_bytes=new * (shape.query_bytes + shape.token_bytes),
            exponentials=_exponentials(shape, prefix + new, new),
        )
    spare = 0 if tokens is None else tokens - real
    return total + KernelCost(0, 0, spare * shape.query_bytes)


def decode_cost(shape: AttentionShape, rows: Sequence[tuple[int, int]], width: int | None = None) -> KernelCost:
    """Of rows of (context, query tokens), whose keys are in the pages; results and logarithms are written.

    `width` is how many queries a row has room for, all of which get results (default: no more than there are).
    """
    total = KernelCost(0, 0, 0)
    for context, queries in rows:
        written = queries if width is None else width
        total += KernelCost(
            flops=visible_pairs(context, queries, shape.window) * shape.pair_flops,
            read_bytes=queries * shape.query_bytes + keys_read(context, queries, shape.window) * shape.token_bytes,
            written_bytes=written * (shape.query_bytes + shape.heads * LOGARITHM_BYTES),
            exponentials=_exponentials(shape, context, queries),
        )
    return total


def _exponentials(shape: AttentionShape, context: int, new: int) -> int:
    return visible_pairs(context, new, shape.window) * shape.heads * (2 if shape.soft_cap else 1)


def kv_pack_cost(shape: AttentionShape, layers: int, pages: int, block_token_bytes: int | None = None) -> KernelCost:
    """Of packing so many pages of all layers into blocks; `shape.kv_heads` are the heads that are packed.

    `block_token_bytes`: of a token's numbers and scales of one layer in the blocks, if other than in the pages.
    """
    tokens = layers * pages * shape.page_tokens
    inner = tokens * shape.token_bytes
    outer = inner if block_token_bytes is None else tokens * block_token_bytes
    return KernelCost(flops=0, read_bytes=inner, written_bytes=outer)


def kv_unpack_cost(shape: AttentionShape, layers: int, pages: int, block_token_bytes: int | None = None) -> KernelCost:
    """Of the way back: as `kv_pack_cost`, with blocks read and pages written."""
    there = kv_pack_cost(shape, layers, pages, block_token_bytes)
    return KernelCost(flops=0, read_bytes=there.written_bytes, written_bytes=there.read_bytes)
