"""Every implementation of paged attention against a loop over queries, with NaN wherever nobody may look."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.kernels.attention import blockwise, reference
from mcjax.kernels.attention.pages import page_dtype, read, write

# Blocks and tiles so small that a case has several of each: see `small`.
SMALL = {"DECODE_BLOCKS": ((2, 8), (None, 24)), "CHUNK_BLOCKS": ((None, 16),), "TILE_TOKENS": 2}
HEADS, KV_HEADS, HEAD_DIM, PAGE, WIDTH, LAYERS = 4, 2, 8, 4, 40, 2


ATTENTIONS = {"reference": reference.paged_attention, "blockwise": blockwise.paged_attention}


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


@pytest.fixture(scope="module")
def small():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(blockwise, name, value)
        yield


@pytest.mark.parametrize("layout", ["tokens_first", "heads_first"])
@pytest.mark.parametrize("name", list(ATTENTIONS))
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6), rows=st.lists(st.tuples(st.integers(0, 155), st.integers(0, 5)), min_size=3, max_size=3)
)
def test_against_one_query_at_a_time(name, layout, seed, rows):
    queries, pages, table, positions = case(np.random.default_rng(seed), rows, 5)
    laid = jnp.asarray(pages if layout == "tokens_first" else np.swapaxes(pages, 3, 4))
    got = ATTENTIONS[name](jnp.asarray(queries), laid, 1, jnp.asarray(table), jnp.asarray(positions), layout)
    want = expected(queries, pages, 1, table, positions)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert not np.asarray(got)[positions < 0].any()


def test_a_longer_mate_changes_no_bit():
    """Blockwise stops at the longest context of the batch: the blocks that only a mate needs must leave a row alone."""
    rng = np.random.default_rng(1)
    queries, pages, table, positions = case(rng, [(20, 1), (150, 1)], 1)
    alone = positions.copy()
    alone[1] = -1
    attend = blockwise.paged_attention
    inputs = (jnp.asarray(queries), jnp.asarray(pages), 0, jnp.asarray(table))
    together = np.asarray(attend(*inputs, jnp.asarray(positions)))
    without = np.asarray(attend(*inputs, jnp.asarray(alone)))
    assert 21 < blockwise.DECODE_BLOCKS[0][1] < 150
    np.testing.assert_array_equal(together[0].view(np.uint32), without[0].view(np.uint32))


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    merged=st.booleans(),
    steps=st.integers(1, 7),
    rows=st.lists(st.tuples(st.integers(0, 153), st.integers(0, 7)), min_size=1, max_size=3),
)
def test_many_blocks_and_tiles_against_one_query_at_a_time(small, seed, merged, steps, rows):
    rows = [(start, min(count, steps)) for start, count in rows]
    queries, pages, table, positions = case(np.random.default_rng(seed), rows, steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "MERGED_TOKENS", 7 if merged else 0)
        got = blockwise.paged_attention(
            jnp.asarray(queries), jnp.asarray(pages), 1, jnp.asarray(table), jnp.asarray(positions)
        )
    np.testing.assert_allclose(got, expected(queries, pages, 1, table, positions), rtol=1e-4, atol=1e-5)
    assert not np.asarray(got)[positions < 0].any()


def test_a_place_in_the_chunk_changes_no_bit(small):
    """The same tokens in one chunk, and in another that starts later: other tiles, other loops, the same bits."""
    queries, pages, table, positions = case(np.random.default_rng(2), [(30, 12)], 12)

    @jax.jit
    def attend(queries, positions):
        return blockwise.paged_attention(queries, jnp.asarray(pages), 0, jnp.asarray(table), positions)

    whole = np.asarray(attend(queries, positions))
    for skipped in (1, 2, 5):
        later = np.asarray(
            attend(np.roll(queries, -skipped, axis=1), np.where(np.arange(12) < 12 - skipped, positions + skipped, -1))
        )
        np.testing.assert_array_equal(
            later[:, : 12 - skipped].view(np.uint32), whole[:, skipped:].view(np.uint32), strict=True
        )


@pytest.mark.parametrize("steps", [1, 6])
def test_bfloat16_pages_are_words(steps):
    """Close to the same numbers in float32, with NaN where nobody may look, and bit for bit what was written."""
    queries, pages, table, positions = case(np.random.default_rng(3), [(100, steps), (40, steps)], steps)
    narrow = jnp.asarray(pages, jnp.bfloat16)
    assert page_dtype("bfloat16", "tokens_first", "cpu") == np.uint16
    assert page_dtype("float32", "tokens_first", "cpu") == np.float32
    words = jax.lax.bitcast_convert_type(narrow, jnp.uint16)
    inputs = (jnp.asarray(queries, jnp.bfloat16), words, 1, jnp.asarray(table), jnp.asarray(positions))
    wide = np.asarray(narrow.astype(jnp.float32))
    want = expected(np.asarray(inputs[0].astype(jnp.float32)), wide, 1, table, positions)
    for name in ("reference", "blockwise"):
        got = ATTENTIONS[name](*inputs)
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=0.02, atol=0.03)

    keys, values = read(words, 1, inputs[3])
    np.testing.assert_array_equal(keys[0, :100], narrow[table[0], 1, 0].reshape(-1, KV_HEADS, HEAD_DIM)[:100])
    entries = jnp.full((2, steps, 2, KV_HEADS, HEAD_DIM), 1.5, jnp.bfloat16)
    places = (jnp.asarray(table)[:, :1] + jnp.zeros_like(inputs[4]), jnp.arange(steps)[None] % PAGE + 0 * inputs[4])
    keys, values = read(write(words, 0, places, entries), 0, inputs[3])
    assert (keys[:, : min(steps, PAGE)] == 1.5).all()
    assert (values[:, : min(steps, PAGE)] == 1.5).all()
