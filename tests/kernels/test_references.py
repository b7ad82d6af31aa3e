"""The definitions themselves, against loops over queries in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_cases import Shape, decode_case, make_case, ragged_sequences

from mcjax.kernels.decode.merge import merge
from mcjax.kernels.decode.reference import decode
from mcjax.kernels.kv_pack.blocks import KVBlocks
from mcjax.kernels.kv_pack.reference import kv_pack, kv_unpack
from mcjax.kernels.pages import KVPages, stored
from mcjax.kernels.prefill.reference import prefill
from mcjax.kvpool.encodings.base import BlockLayout
from mcjax.kvpool.encodings.named import packer_of

SHAPE = Shape()

compiled = jax.jit(prefill, static_argnames=("layer", "window", "soft_cap"))


def attended(query, keys, values, position, window, soft_cap):
    """One query `[H, D]` over keys and values `[S, Hkv, D]`, in float64: its result, and the logarithm of its sum."""
    first = 0 if window is None else max(0, position - window + 1)
    groups = query.shape[0] // keys.shape[1]
    out, logs = np.zeros(query.shape), np.zeros(query.shape[0])
    for head, vector in enumerate(query):
        seen = slice(first, position + 1)
        scores = keys[seen, head // groups] @ vector / np.sqrt(query.shape[1])
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        weights = np.exp(scores)
        out[head] = weights @ values[seen, head // groups] / weights.sum()
        logs[head] = np.log(weights.sum())
    return out, logs


@settings(max_examples=20, deadline=None)
@given(ragged_sequences(SHAPE), st.sampled_from([None, 1, 4, 5]), st.sampled_from([None, 2.0]), st.integers(0, 2))
def test_prefill_is_attention_of_every_new_token(sequences, window, soft_cap, gap) -> None:
    case = make_case(np.random.default_rng(0), SHAPE, sequences, gap)
    out, pages = compiled(*case.prefill_arguments, window=window, soft_cap=soft_cap)
    wanted = np.zeros(out.shape)
    for b, (prefix, length) in enumerate(sequences):
        entries = np.asarray(pages.read(SHAPE.layer, case.page_table[b]), np.float64)  # [2, S, Hkv, D]
        rows = slice(case.starts[b], case.starts[b] + length)
        np.testing.assert_array_equal(entries[0, prefix : prefix + length], case.keys[rows])
        np.testing.assert_array_equal(entries[1, prefix : prefix + length], case.values[rows])
        for t in range(length):
            query = np.asarray(case.queries[rows][t], np.float64)
            wanted[rows][t] = attended(query, entries[0], entries[1], prefix + t, window, soft_cap)[0]
    np.testing.assert_allclose(out, wanted, atol=2e-6)
    untouched = np.asarray(pages.data).copy()
    for b, (prefix, length) in enumerate(sequences):
        for position in range(prefix, prefix + length):
            page, offset = case.page_table[b, position // SHAPE.page_tokens], position % SHAPE.page_tokens
            untouched[page, SHAPE.layer, :, :, offset] = np.nan
    np.testing.assert_array_equal(untouched, case.pages.data)


def test_what_lies_before_every_window_may_be_nan() -> None:
    case = make_case(np.random.default_rng(6), SHAPE, [(17, 3)])
    queries, keys, values, pages, layer, table, *rest = case.prefill_arguments
    wanted, _ = prefill(queries, keys, values, pages, layer, table, *rest, window=5)
    gone = KVPages(pages.data.at[table[0, :3]].set(jnp.nan))  # positions 0 to 11; the first that is seen is 13
    found, _ = prefill(queries, keys, values, gone, layer, table, *rest, window=5)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (3, None), (None, 2.0)])
def test_decode_is_attention_of_the_last_tokens_and_shards_merge_to_it(window, soft_cap) -> None:
    rows = [(1, 1), (24, 3), (13, 2), (0, 0), (8, 0), (3, 3)]
    queries, pages, layer, table, contexts, lengths = decode_case(np.random.default_rng(1), SHAPE, rows, 3)
    options = {"window": window, "soft_cap": soft_cap}
    out, logs = decode(queries, pages, layer, table, contexts, lengths, **options)
    entries = np.asarray(pages.read(layer, table), np.float64)  # [B, 2, S, Hkv, D]
    for b, (context, length) in enumerate(rows):
        np.testing.assert_array_equal(out[b, length:], 0)
        np.testing.assert_array_equal(logs[b, length:], -np.inf)
        for q in range(length):
            position = context - length + q
            query = np.asarray(queries[b, q], np.float64)
            wanted = attended(query, entries[b, 0], entries[b, 1], position, window, soft_cap)
            np.testing.assert_allclose(out[b, q], wanted[0], atol=2e-6)
            np.testing.assert_allclose(logs[b, q], wanted[1], atol=2e-6)
    parts = []
    for first, until in ((0, 2), (2, 3), (3, 6)):
        firsts = jnp.full(len(rows), first * SHAPE.page_tokens, jnp.int32)
        parts.append(decode(queries, pages, layer, table[:, first:until], contexts, lengths, firsts, **options))
    merged, merged_logs = merge(jnp.stack([part[0] for part in parts]), jnp.stack([part[1] for part in parts]))
    np.testing.assert_allclose(merged, out, atol=2e-6)
    np.testing.assert_allclose(merged_logs, logs, atol=2e-6)


def test_a_part_that_saw_nothing_counts_for_nothing_even_if_it_is_nan() -> None:
    mixed = jnp.array([[[1.0, 2.0], [np.nan, np.nan]], [[np.nan, np.nan], [np.nan, np.nan]]])
    merged, logs = merge(mixed, jnp.array([[0.5, -np.inf], [-np.inf, -np.inf]]))
    np.testing.assert_allclose(merged, [[1, 2], [0, 0]])
    np.testing.assert_allclose(logs, [0.5, -np.inf])


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_a_prompt_split_anywhere_gives_the_same_over_quantised_pages(kv_dtype) -> None:
    shape = Shape(kv_dtype=kv_dtype, layers=1, layer=0)
    whole = make_case(np.random.default_rng(2), shape, [(3, 17)])
    out, pages = prefill(*whole.prefill_arguments)
    queries, keys, values, halves, layer, table, starts, *_ = whole.prefill_arguments
    split = jnp.zeros_like(out)
    for at, count in ((0, 6), (6, 11)):
        piece = (starts + at, jnp.array([count]), jnp.array([3 + at]))
        found, halves = prefill(queries, keys, values, halves, layer, table, *piece)
        split = split.at[at : at + count].set(found[at : at + count])
    np.testing.assert_allclose(split, out, atol=2e-6)
    np.testing.assert_array_equal(halves.scales, pages.scales)


@pytest.mark.parametrize(("name", "dtype"), [("int8", jnp.int8), ("fp8", jnp.float8_e4m3fn)])
@pytest.mark.parametrize("source", ["float32", "bfloat16"])
def test_quantised_blocks_are_the_bytes_of_the_encoding_at_rest(name, dtype, source) -> None:
    rng = np.random.default_rng(3)
    pages = KVPages(jnp.asarray(rng.normal(size=(5, 2, 2, 3, 4, 16)) * 3, source))
    pages = KVPages(pages.data.at[2, :, :, :, 3].set(jnp.nan))  # a page that is not full
    blocks = kv_pack(pages, jnp.array([4, 2]), dtype=dtype)
    packer = packer_of(name, BlockLayout(source, tokens=4, rows=12, width=16), "here")
    plain = kv_pack(pages, jnp.array([4, 2]))
    for index in range(2):
        wanted = packer.pack(np.asarray(plain.data[index]).reshape(-1).view(np.uint8))
        assert blocks.scales is not None
        scales, numbers = np.asarray(blocks.scales[index]), np.asarray(blocks.data[index])
        found = np.concatenate([scales.reshape(-1).view(np.uint8), numbers.reshape(-1).view(np.uint8)])
        np.testing.assert_array_equal(found, wanted)


def test_ranges_of_heads_from_two_senders_make_a_receivers_page() -> None:
    rng = np.random.default_rng(4)
    whole = KVPages(jnp.asarray(rng.normal(size=(3, 1, 2, 4, 4, 8)), jnp.float32))
    slots = jnp.array([2, 0])
    target = KVPages.filled(5, 1, 4, 4, 8, "float32", float("nan"))
    for first, heads in ((0, 1), (1, 3)):
        blocks = kv_pack(whole, slots, first_head=first, heads=heads)
        assert isinstance(blocks, KVBlocks)
        target = kv_unpack(target, jnp.array([1, 4]), blocks, first_head=first)
    np.testing.assert_array_equal(target.data[jnp.array([1, 4])], whole.data[slots])
    assert np.isnan(target.data[jnp.array([0, 2, 3])]).all()


@pytest.mark.parametrize(("dtype", "bound"), [("int8", 0.5 / 127), ("float8_e4m3fn", 2**-4)])
def test_storing_keeps_each_number_within_its_bound(dtype, bound) -> None:
    values = np.random.default_rng(5).normal(size=(50, 16)).astype(np.float32) * 10.0 ** np.arange(-25, 25)[:, None]
    numbers, scales = stored(jnp.asarray(values), dtype)
    error = np.abs(np.asarray(numbers, np.float32) * np.asarray(scales)[:, None] - values)
    assert (error <= np.abs(values).max(axis=1, keepdims=True) * bound * 1.001).all()
