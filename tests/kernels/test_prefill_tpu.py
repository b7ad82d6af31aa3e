"""The TPU's body of prefill, interpreted, against the definition: ragged batches, NaN wherever none may look."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ragged_cases import Shape, make_case, ragged_sequences

from mcjax.errors import KernelRefused
from mcjax.kernels.pages import KVPages
from mcjax.kernels.prefill import dispatch, reference, tpu
from mcjax.kernels.prefill.tpu_schedule import most_blocks, most_pieces, page_pieces, query_blocks
from mcjax.kernels.target import Target

INTERPRETED = Target("tpu", interpret=True)

TABLE = Shape()
"""All variants share its tables, so that one strategy draws for all."""

VARIANTS = {
    "float32": (Shape(), {}),
    "window": (Shape(heads=2), {"window": 5}),
    "window of one, soft cap, bfloat16, a head of its own for each query head": (
        Shape(heads=2, dtype="bfloat16"),
        {"window": 1, "soft_cap": 2.0},
    ),
    "bfloat16, three query heads over one key head": (Shape(heads=3, kv_heads=1, dtype="bfloat16"), {}),
    "float32 over bfloat16": (Shape(kv_dtype="bfloat16"), {"scale": -0.3}),
    "int8": (Shape(kv_dtype="int8", heads=6), {"window": 4}),
    "float8, bfloat16": (Shape(kv_dtype="float8_e4m3fn", dtype="bfloat16", kv_heads=4), {"soft_cap": 3.0}),
}


@functools.cache
def body_of(variant: str):
    _, options = VARIANTS[variant]
    blocks = {"query_tokens": 8, "tile_tokens": 4, "key_tokens": 8}
    whole = functools.partial(tpu.prefill, target=INTERPRETED, **blocks, **options)
    return jax.jit(whole, static_argnames="layer")


@functools.cache
def definition_of(variant: str):
    return jax.jit(functools.partial(reference.prefill, **VARIANTS[variant][1]), static_argnames="layer")


def bound_of(shape: Shape, values: jax.Array) -> float:
    """Float32: rounding of sums. Bfloat16: weights and results are rounded by 2**-9 of themselves each."""
    most = float(jnp.nan_to_num(jnp.abs(values.astype(jnp.float32))).max())
    return max(most, 8.0) * (2.0**-7 if shape.dtype == "bfloat16" else 4e-7)


def same_bits(one: KVPages, other: KVPages) -> None:
    for found, wanted in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
        unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[found.dtype.itemsize]
        bits = [np.asarray(jnp.where(jnp.isnan(array), 0, array)).view(unsigned) for array in (found, wanted)]
        np.testing.assert_array_equal(bits[0], bits[1])
        np.testing.assert_array_equal(jnp.isnan(found), jnp.isnan(wanted))


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=10, deadline=None)
@given(sequences=ragged_sequences(TABLE), gap=st.integers(0, 2), seed=st.integers(0, 3))
@example(sequences=[(0, 0), (0, 0), (0, 0)], gap=1, seed=0)
@example(sequences=[(0, 24), (23, 1), (0, 1)], gap=0, seed=0)
@example(sequences=[(4, 8), (3, 5), (5, 3)], gap=1, seed=0)
def test_every_ragged_batch_is_what_the_definition_says(variant, sequences, gap, seed) -> None:
    shape, _ = VARIANTS[variant]
    case = make_case(np.random.default_rng(seed), shape, sequences, 1)
    queries, keys, values, pages, layer, table, starts, lengths, prefixes = case.prefill_arguments
    if gap == 0:  # close up: rows of nobody at the end only
        starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths)[:-1]])
    if gap == 2:  # the last sequence's rows come first
        starts = jnp.cumsum(lengths[::-1] + 1)[::-1] - lengths - 1
    queries, keys, values = (rows_at(array, case.starts, starts, lengths) for array in (queries, keys, values))
    rest = (pages, layer, table, starts, lengths, prefixes)
    found, written = body_of(variant)(queries, keys, values, *rest)
    wide = (array.astype(jnp.float32) for array in (queries, keys, values))
    wanted, wanted_pages = definition_of(variant)(*wide, *rest)
    assert found.dtype == queries.dtype
    np.testing.assert_allclose(found.astype(jnp.float32), wanted, atol=bound_of(shape, values), rtol=0)
    same_bits(written, wanted_pages)


def rows_at(array: jax.Array, starts: np.ndarray, moved: jax.Array, lengths: jax.Array) -> jax.Array:
    """Each sequence's rows at `moved` instead of `starts`; NaN everywhere else."""
    found = np.full(array.shape, np.nan, np.float32)
    for start, to, length in zip(starts, np.asarray(moved), np.asarray(lengths)):
        found[to : to + length] = array[start : start + length].astype(jnp.float32)
    return jnp.asarray(found, array.dtype)


blocks_of = jax.jit(query_blocks, static_argnums=(3, 4))
pieces_of = jax.jit(page_pieces, static_argnums=(4, 5, 6))


@settings(max_examples=60, deadline=None)
@given(ragged_sequences(TABLE), st.integers(0, 2))
def test_blocks_and_pieces_cover_each_row_and_each_new_token_once(sequences, gap) -> None:
    case = make_case(np.random.default_rng(0), TABLE, sequences, gap)
    tokens, page = case.queries.shape[0], TABLE.page_tokens
    *_, table, starts, lengths, prefixes = case.prefill_arguments
    blocks = jax.tree.map(np.asarray, blocks_of(starts, lengths, prefixes, tokens, 8))
    total, owned = int(blocks.total), int(blocks.owned)
    assert total <= most_blocks(tokens, 3, 8) == blocks.row.shape[0]
    rows = np.zeros(tokens, int)
    owners = np.full(tokens, -1)
    for i in range(total):
        covered = slice(int(blocks.row[i]), int(blocks.row[i] + blocks.rows[i]))
        rows[covered] += 1
        assert 0 < blocks.rows[i] <= 8
        if i < owned:
            sequence = int(blocks.sequence[i])
            owners[covered] = sequence
            assert blocks.position[i] == prefixes[sequence] + blocks.row[i] - starts[sequence]
    np.testing.assert_array_equal(rows, 1)
    wanted = np.full(tokens, -1)
    places: dict[tuple[int, int], int] = {}
    for b, (prefix, length) in enumerate(sequences):
        wanted[case.starts[b] : case.starts[b] + length] = b
        for t in range(length):
            at = prefix + t
            places[int(case.page_table[b, at // page]), at % page] = int(case.starts[b]) + t
    np.testing.assert_array_equal(owners, wanted)

    for size in (page // 2, page):
        pieces = jax.tree.map(np.asarray, pieces_of(table, starts, lengths, prefixes, tokens, page, size))
        assert int(pieces.total) <= most_pieces(tokens, 3, size) == pieces.page.shape[0]
        found: dict[tuple[int, int], int] = {}
        for w in range(int(pieces.total)):
            assert pieces.offset[w] % size == 0
            for at in range(int(pieces.least[w]), int(pieces.until[w])):
                place = int(pieces.page[w]), int(pieces.offset[w]) + at
                assert place not in found
                found[place] = int(pieces.rows[w, at])
        assert found == places


def test_a_window_lets_go_of_pages_that_none_sees_any_more() -> None:
    shape, options = VARIANTS["window"]
    case = make_case(np.random.default_rng(3), shape, [(13, 3), (0, 0), (0, 9)])
    queries, keys, values, pages, layer, table, *rest = case.prefill_arguments
    wanted, _ = definition_of("window")(queries, keys, values, pages, layer, table, *rest)
    assert options == {"window": 5}  # positions 9 and on are seen: page 2 of the first sequence, and half of it not
    released = pages.data.at[table[0, :2]].set(jnp.nan).at[table[0, 2], :, :, :, 0].set(jnp.nan)
    found, _ = body_of("window")(queries, keys, values, KVPages(released), layer, table, *rest)
    np.testing.assert_allclose(found, wanted, atol=4e-6)


def refusal(**changes) -> str:
    """What is said of 1,024 tokens of Llama-3-8B on a v6e, but for `changes`."""
    shape = {"heads": 32, "kv_heads": 8, "head_dim": 128, "page": 64, "table": (8, 128), "queries": {}, "body": None}
    shape |= changes
    rows = jax.ShapeDtypeStruct((1024, shape["heads"], shape["head_dim"]), jnp.bfloat16)
    entries = jax.ShapeDtypeStruct((1024, shape["kv_heads"], shape["head_dim"]), jnp.bfloat16)
    data = jax.ShapeDtypeStruct((64, 2, 2, shape["kv_heads"], shape["page"], shape["head_dim"]), jnp.bfloat16)
    number = jax.ShapeDtypeStruct((shape["table"][0],), jnp.int32)
    table = jax.ShapeDtypeStruct(shape["table"], jnp.int32)
    target = Target("tpu", "TPU v6 lite")

    def call(rows, entries, data, table, number):
        arrays = (rows, entries, entries, KVPages(data), 0, table, number, number, number)
        if shape["queries"]:
            return tpu.prefill(*arrays, target=target, **shape["queries"])
        return dispatch.prefill(*arrays, target=target, body=shape["body"])

    with pytest.raises(KernelRefused) as refused:
        jax.eval_shape(call, rows, entries, data, table, number)
    return str(refused.value)


def test_refusals_name_what_does_not_fit_and_the_way_out() -> None:
    assert "pages of 48 tokens" in refusal(page=48)
    assert "6 query heads over 4 key heads" in refusal(heads=6, kv_heads=4)
    assert "query_tokens=96: take a power of two" in refusal(queries={"query_tokens": 96}).replace(";", ":")
    large = refusal(queries={"query_tokens": 1024, "key_tokens": 4096})
    assert "bytes of VMEM" in large
    assert "lower query_tokens" in large
    table = refusal(table=(64, 8192))
    assert "scalar memory" in table
    assert "larger pages" in table
    assert "no body 'gpu' for tpu" in refusal(body="gpu")


def test_dispatch_runs_the_body_of_the_target() -> None:
    case = make_case(np.random.default_rng(1), Shape(), [(3, 6), (0, 1), (8, 0)])
    call = jax.jit(functools.partial(dispatch.prefill, target=INTERPRETED), static_argnames=("layer", "body"))
    found, _ = call(*case.prefill_arguments, body="tpu")  # 75 rows and tables of 24 tokens: the tuned blocks are larger
    wanted, _ = reference.prefill(*case.prefill_arguments)
    np.testing.assert_allclose(found, wanted, atol=4e-6)
