"""Every implementation of paged attention against a loop over queries, with NaN wherever nobody may look."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.errors import ConfigError
from mcjax.kernels.attention import blockwise
from mcjax.kernels.attention.dispatch import paged_attention

HEADS, KV_HEADS, HEAD_DIM, PAGE, WIDTH, LAYERS = 4, 2, 8, 4, 40, 2


def expected(queries, pages, layer, table, positions):
    """One query at a time, in float64, over exactly the keys it may see."""
    out = np.zeros(queries.shape)
    for b, t in np.argwhere(positions >= 0):
        seen = np.arange(positions[b, t] + 1)
        entries = pages[table[b, seen // PAGE], layer, :, seen % PAGE].astype(np.float64)  # [S, 2, Hkv, D]
        for head in range(HEADS):
            keys, values = entries[:, 0, head // 2], entries[:, 1, head // 2]
            scores = keys @ queries[b, t, head].astype(np.float64) / np.sqrt(HEAD_DIM)
            weights = np.exp(scores - scores.max())
            out[b, t, head] = weights @ values / weights.sum()
    return out


def case(rng, rows, steps):
    """`rows` of (start, count): positions start..start+count, then padding; unwritten places hold NaN."""
    queries = rng.normal(size=(len(rows), steps, HEADS, HEAD_DIM)).astype(np.float32)
    pages = np.full((len(rows) * WIDTH + 1, LAYERS, 2, PAGE, KV_HEADS, HEAD_DIM), np.nan, np.float32)
    table = rng.permutation(len(rows) * WIDTH).reshape(len(rows), WIDTH).astype(np.int32)
    positions = np.full((len(rows), steps), -1, np.int32)
    for b, (start, count) in enumerate(rows):
        positions[b, :count] = np.arange(start, start + count)
        for position in range(start + count if count else 0):
            entry = rng.normal(size=(LAYERS, 2, KV_HEADS, HEAD_DIM)) * 3
            pages[table[b, position // PAGE], :, :, position % PAGE] = entry
    return queries, pages, table, positions


@pytest.mark.parametrize("name", ["reference", "blockwise"])
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6), rows=st.lists(st.tuples(st.integers(0, 155), st.integers(0, 5)), min_size=3, max_size=3)
)
def test_against_one_query_at_a_time(name, seed, rows):
    queries, pages, table, positions = case(np.random.default_rng(seed), rows, 5)
    got = paged_attention(name)(jnp.asarray(queries), jnp.asarray(pages), 1, jnp.asarray(table), jnp.asarray(positions))
    want = expected(queries, pages, 1, table, positions)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert not np.asarray(got)[positions < 0].any()


def test_a_longer_mate_changes_no_bit():
    """Blockwise stops at the longest context of the batch: the blocks that only a mate needs must leave a row alone."""
    rng = np.random.default_rng(1)
    queries, pages, table, positions = case(rng, [(20, 1), (150, 1)], 1)
    alone = positions.copy()
    alone[1] = -1
    attend = paged_attention("blockwise")
    inputs = (jnp.asarray(queries), jnp.asarray(pages), 0, jnp.asarray(table))
    together = np.asarray(attend(*inputs, jnp.asarray(positions)))
    without = np.asarray(attend(*inputs, jnp.asarray(alone)))
    assert 21 < blockwise.DECODE_BLOCKS[0][1] < 150
    np.testing.assert_array_equal(together[0].view(np.uint32), without[0].view(np.uint32))


def test_unknown_names_are_refused_with_the_list():
    with pytest.raises(ConfigError, match=r"kernels\.attention=flash.*blockwise, reference"):
        paged_attention("flash")
