"""Ragged batches for attention kernels, in shuffled pages; NaN wherever none may look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from mcjax.kernels.pages import LARGEST, KVPages, stored


@dataclass(frozen=True)
class Shape:
    """What all sequences of a case share."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page_tokens: int = 4
    table_pages: int = 6
    layers: int = 2
    layer: int = 1
    dtype: str = "float32"
    """Of queries, keys and values."""
    kv_dtype: str = ""
    """Of the pages; empty: the same."""

    @property
    def page_dtype(self) -> str:
        return self.kv_dtype or self.dtype


@dataclass(frozen=True)
class Case:
    """Arguments of `prefill`, in its order; those of `decode` by `decode_arguments`."""

    shape: Shape
    sequences: tuple[tuple[int, int], ...]
    queries: jnp.ndarray
    keys: jnp.ndarray
    values: jnp.ndarray
    pages: KVPages
    page_table: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    prefixes: np.ndarray

    @property
    def prefill_arguments(self) -> tuple:
        shape = self.shape
        arrays = (self.page_table, self.starts, self.lengths, self.prefixes)
        return (self.queries, self.keys, self.values, self.pages, shape.layer, *map(jnp.asarray, arrays))


def make_case(rng: np.random.Generator, shape: Shape, sequences: Sequence[tuple[int, int]], gap: int = 1) -> Case:
    """Sequences of (prefix, new tokens), `gap` rows of nobody between them; pages hold the prefixes only.

    Unwritten offsets and pages of nobody are NaN, and so are the rows of nobody. There are spare pages.
    """
    batch, table_pages, page = len(sequences), shape.table_pages, shape.page_tokens
    prefixes = np.array([prefix for prefix, _ in sequences], np.int32)
    lengths = np.array([length for _, length in sequences], np.int32)
    assert (prefixes + lengths <= table_pages * page).all()
    starts = np.concatenate([[0], np.cumsum(lengths + gap)[:-1]]).astype(np.int32)
    tokens = batch * (table_pages * page + gap)  # the same for every draw: one shape, one compilation
    count = batch * table_pages + 2
    table = rng.permutation(count)[: batch * table_pages].reshape(batch, table_pages).astype(np.int32)

    def rows(heads: int) -> np.ndarray:
        found = np.full((tokens, heads, shape.head_dim), np.nan, np.float32)
        for start, length in zip(starts, lengths):
            found[start : start + length] = rng.normal(size=(length, heads, shape.head_dim))
        return found

    written = np.zeros((count, page), bool)
    for b, prefix in enumerate(prefixes):
        place = np.arange(prefix)
        written[table[b, place // page], place % page] = True
    entries = rng.normal(size=(count, shape.layers, 2, shape.kv_heads, page, shape.head_dim)) * 2
    numbers, scales = stored(jnp.asarray(entries, jnp.float32), shape.page_dtype)
    seen = written[:, None, None, None]
    if shape.page_dtype in LARGEST:
        pages = KVPages(numbers, jnp.where(seen, scales, jnp.nan))
    else:
        pages = KVPages(jnp.where(seen[..., None], numbers, jnp.nan).astype(shape.page_dtype))
    queries, keys, values = (
        jnp.asarray(rows(heads), shape.dtype) for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    return Case(shape, tuple(sequences), queries, keys, values, pages, table, starts, lengths, prefixes)


def decode_case(rng: np.random.Generator, shape: Shape, rows: Sequence[tuple[int, int]], width: int) -> tuple:
    """Arguments of `decode`: rows of (context, valid queries of `width`), NaN in the queries beyond."""
    filled = make_case(rng, shape, [(context, 0) for context, _ in rows])
    lengths = np.array([length for _, length in rows], np.int32)
    queries = rng.normal(size=(len(rows), width, shape.heads, shape.head_dim)).astype(np.float32)
    queries[np.arange(width) >= lengths[:, None]] = np.nan
    arrays = (filled.page_table, filled.prefixes, lengths)
    return (jnp.asarray(queries, shape.dtype), filled.pages, shape.layer, *map(jnp.asarray, arrays))
