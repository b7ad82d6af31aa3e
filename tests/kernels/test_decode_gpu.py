"""The GPU's decode, interpreted, against the reference; NaN wherever it may not look."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_cases import Shape, decode_case, edge_sizes

from mcjax.errors import KernelRefused
from mcjax.kernels.decode import gpu, reference
from mcjax.kernels.decode.gpu_plan import Blocks, Plan, tuned
from mcjax.kernels.decode.merge import merge
from mcjax.kernels.pages import KVPages
from mcjax.kernels.target import Target

GPU = Target("gpu", "NVIDIA H200", interpret=True)
BLOCKS = Blocks(key_tile=16, row_tile=16, least_tokens=16, most_tokens=32, blocks=5, num_warps=4, num_stages=2)
BATCH = 4


@functools.cache
def compiled(layer: int, blocks: Blocks | None = BLOCKS, **options):
    """Body and reference, once for each shape."""

    def both(queries, pages, table, contexts, lengths, firsts=None):
        arguments = (pages, layer, table, contexts, lengths, firsts)
        wide = reference.decode(queries.astype(jnp.float32), *arguments, **options)
        return gpu.decode(queries, *arguments, target=GPU, blocks=blocks, **options), wide

    return jax.jit(both)


def check(shape: Shape, rows, width: int, seed: int = 0, blocks: Blocks | None = BLOCKS, **options) -> None:
    queries, pages, layer, table, contexts, lengths = decode_case(np.random.default_rng(seed), shape, rows, width)
    (mixed, logs), (wanted, wanted_logs) = compiled(layer, blocks, **options)(queries, pages, table, contexts, lengths)
    assert mixed.dtype == queries.dtype
    # Weights and result are rounded once to bfloat16; everything else is exact in it, or float32.
    largest = float(np.nanmax(np.abs(np.asarray(pages.read(layer, table))), initial=1.0))
    bound = 2.0**-7 * largest if mixed.dtype == jnp.bfloat16 else 4e-6
    np.testing.assert_allclose(np.asarray(mixed, np.float32), wanted, atol=bound, rtol=0)
    np.testing.assert_allclose(logs, wanted_logs, atol=2e-5 if mixed.dtype == jnp.bfloat16 else 4e-6, rtol=0)


@st.composite
def ragged_rows(draw: st.DrawFn, shape: Shape, width: int):
    most = shape.table_pages * shape.page_tokens
    rows = []
    for _ in range(BATCH):
        context = draw(edge_sizes(shape.page_tokens, most))
        rows.append((context, draw(st.integers(0, min(width, context)))))
    return rows


SMALL = Shape(heads=6, kv_heads=2, head_dim=32, page_tokens=4, table_pages=16)
ONE_HEAD = Shape(heads=5, kv_heads=1, head_dim=80, page_tokens=16, table_pages=5, dtype="bfloat16")
OWN_HEADS = Shape(heads=3, kv_heads=3, head_dim=96, page_tokens=12, table_pages=5)


@settings(max_examples=25, deadline=None)
@given(ragged_rows(SMALL, 3), st.integers(0, 3))
def test_ragged_rows_of_several_queries(rows, seed) -> None:
    check(SMALL, rows, 3, seed=seed)


@settings(max_examples=25, deadline=None)
@given(ragged_rows(SMALL, 3))
def test_a_window_over_several_parts_and_a_soft_cap(rows) -> None:
    check(SMALL, rows, 3, window=21, soft_cap=1.5, scale=0.4)


@settings(max_examples=15, deadline=None)
@given(ragged_rows(ONE_HEAD, 1))
def test_one_key_head_whose_vectors_are_no_power_of_two_in_bfloat16(rows) -> None:
    check(ONE_HEAD, rows, 1)


@settings(max_examples=15, deadline=None)
@given(ragged_rows(OWN_HEADS, 1))
def test_each_head_its_own_keys_in_pages_that_are_no_power_of_two(rows) -> None:
    check(OWN_HEADS, rows, 1, window=13)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bfloat16", "int8"), ("float32", "float8_e4m3fn")])
def test_quantised_pages_are_read_directly_by_the_tuned_blocks(dtype, kv_dtype) -> None:
    shape = Shape(heads=4, kv_heads=2, head_dim=64, page_tokens=64, table_pages=5, dtype=dtype, kv_dtype=kv_dtype)
    for rows in ([(320, 1), (129, 1), (0, 0), (128, 1)], [(1, 1), (63, 0), (65, 1), (257, 1)]):
        check(shape, rows, 1, blocks=None)


def test_more_query_vectors_than_a_block_takes_read_the_keys_again() -> None:
    shape = Shape(heads=8, kv_heads=1, head_dim=16, page_tokens=4, table_pages=8)
    check(shape, [(32, 5), (9, 2), (5, 5), (0, 0)], 5)  # 40 vectors in blocks of 16


def test_shards_of_a_context_merge_to_the_whole() -> None:
    rows = [(64, 3), (5, 1), (33, 3), (13, 2)]
    queries, pages, layer, table, contexts, lengths = decode_case(np.random.default_rng(1), SMALL, rows, 3)
    whole = reference.decode(queries, pages, layer, table, contexts, lengths, window=30)
    parts = []
    for first in (0, 8):
        firsts = jnp.full(len(rows), first * SMALL.page_tokens, jnp.int32)
        share = table[:, first : first + 8]
        parts.append(compiled(layer, window=30)(queries, pages, share, contexts, lengths, firsts)[0])
    mixed, logs = merge(*(jnp.stack([part[which] for part in parts]) for which in (0, 1)))
    np.testing.assert_allclose(mixed, whole[0], atol=4e-6)
    np.testing.assert_allclose(logs, whole[1], atol=4e-6)


def test_the_bits_of_a_row_do_not_depend_on_the_rest_of_the_batch() -> None:
    alone = [(0, 0), (0, 0), (61, 2), (0, 0)]
    among = [(64, 3), (1, 1), (61, 2), (40, 3)]
    found = []
    queries, pages, layer, table, *_ = decode_case(np.random.default_rng(2), SMALL, [(64, 3)] * 4, 3)
    for rows in (alone, among):
        contexts, lengths = (jnp.array(column, jnp.int32) for column in zip(*rows))
        mixed, logs = compiled(layer)(queries, pages, table, contexts, lengths)[0]
        found.append((np.asarray(mixed[2]), np.asarray(logs[2])))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])


def plan(**changes) -> Plan:
    known = {
        "batch": 2, "width": 1, "kv_heads": 1, "groups": 8, "head_dim": 128, "page_tokens": 16, "page_vectors": 64,
        "table_tokens": 131072, "window": None, "soft_cap": None, "scale": 1.0, "compute_dtype": jnp.bfloat16,
        "sharded": False, "page_dtype": jnp.dtype(jnp.bfloat16), "interpret": True,
        "blocks": tuned(GPU, 128, jnp.bfloat16, 8),
    }  # fmt: skip
    return Plan(**known | changes)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 131072), st.integers(1, 300), st.sampled_from([1, 8, 32]), st.sampled_from([None, 1, 4096]))
def test_parts_cover_what_is_seen_and_none_is_empty(context, batch, kv_heads, window) -> None:
    case = plan(batch=batch, kv_heads=kv_heads, window=window)
    low, high = (int(end) for end in case.seen(jnp.array(context), jnp.array(1), jnp.array(0)))
    assert (low, high) == (0 if window is None else max(0, context - window), context)
    parts, each = (int(number) for number in case.parts(jnp.array(high - low)))
    assert parts <= case.most_parts
    assert (parts == 0) == (high == low)
    assert parts == 0 or (parts - 1) * each < high - low <= parts * each
    assert each <= case.blocks.most_tokens
    assert parts <= 1 or each >= case.blocks.least_tokens or each >= (high - low) / parts / 2


@pytest.mark.parametrize(("batch", "kv_heads", "context"), [(1, 1, 32768), (1, 8, 8192), (32, 8, 4096), (256, 1, 4096)])
def test_every_block_has_work_when_rows_are_alike(batch, kv_heads, context) -> None:
    case = plan(batch=batch, kv_heads=kv_heads)
    parts = int(case.parts(jnp.array(context))[0])
    assert batch * case.pieces * parts >= 132 * 2 * 0.9


def test_a_row_without_queries_is_no_work() -> None:
    low, high = plan().seen(jnp.array(5000), jnp.array(0), jnp.array(0))
    assert int(plan().parts(high - low)[0]) == 0


@pytest.mark.parametrize(
    ("pages", "dtype", "problem"),
    [(2**31 // 256 + 1, jnp.int8, r"vectors.*at most 2\^31"), (4, jnp.float16, "numbers of float16")],
)
def test_what_has_no_body_is_refused(pages, dtype, problem) -> None:
    def call(queries, pages, table, row):
        return gpu.decode(queries, pages, 0, table, row, row, target=GPU)

    row, table = jax.ShapeDtypeStruct((2,), jnp.int32), jax.ShapeDtypeStruct((2, 4), jnp.int32)
    queries = jax.ShapeDtypeStruct((2, 1, 32, 128), jnp.bfloat16)
    stored = jax.eval_shape(lambda: KVPages.filled(pages, 1, 8, 16, 128, dtype))
    with pytest.raises(KernelRefused, match=problem):
        jax.eval_shape(call, queries, stored, table, row)
