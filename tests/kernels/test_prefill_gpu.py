"""The Triton body of prefill, interpreted, against the reference over float32 copies of the same values."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_cases import Case, Shape, make_case, ragged_sequences

from mcjax.errors import KernelRefused
from mcjax.kernels import compat
from mcjax.kernels.pages import LARGEST, KVPages
from mcjax.kernels.prefill import gpu, gpu_mosaic, reference
from mcjax.kernels.prefill.gpu_blocks import blocks_of
from mcjax.kernels.target import Target

compiled = jax.jit(gpu.prefill, static_argnames=("target", "window", "soft_cap", "scale", "rows", "block_keys"))
blocks_by = jax.jit(blocks_of, static_argnames=("rows", "tokens"))
wanted_of = jax.jit(reference.prefill, static_argnames=("window", "soft_cap", "scale"))

BLOCKS = {"target": Target("gpu", interpret=True), "rows": 8, "block_keys": 8}
PLAIN = {"window": None, "soft_cap": None}

SMALL_PAGES = Shape(head_dim=16, page_tokens=4, table_pages=6)  # a block of keys is of several pages
LARGE_PAGES = Shape(heads=3, kv_heads=1, head_dim=24, page_tokens=16, table_pages=2)  # or a page of several blocks


def check(case: Case, **options) -> None:
    """Results, pages and their scales; nothing that NaN surrounds is NaN, and rows of nobody are zeros."""
    out, pages = compiled(*case.prefill_arguments, **options, **BLOCKS)
    queries, keys, values, before, *rest = case.prefill_arguments
    wanted, written = wanted_of(queries.astype(jnp.float32), keys, values, before, *rest, **options)
    np.testing.assert_array_equal(np.asarray(pages.data, np.float32), np.asarray(written.data, np.float32))
    if before.scales is not None:
        np.testing.assert_array_equal(pages.scales, written.scales)
    assert out.dtype == queries.dtype
    np.testing.assert_allclose(np.asarray(out, np.float32), wanted, atol=bound_of(case, written), rtol=0)


def bound_of(case: Case, pages: KVPages) -> float:
    """Float32: the order of sums, of scores too. Bfloat16: each weight and the result, to nearest. Means of values."""
    entries = np.abs(np.asarray(pages.read(case.shape.layer, jnp.asarray(case.page_table))))
    largest = float(entries.max(initial=0, where=~np.isnan(entries)))
    return (2e-6 if case.queries.dtype == jnp.float32 else 2.0**-7) * largest


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_prefill_over_ragged_batches(data) -> None:
    shape, options = data.draw(st.sampled_from([(SMALL_PAGES, PLAIN), (LARGE_PAGES, {"window": 9, "soft_cap": 2.0})]))
    case = make_case(np.random.default_rng(0), shape, data.draw(ragged_sequences(shape)), data.draw(st.integers(0, 2)))
    check(case, **options)


@pytest.mark.check_long
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_prefill_over_many_ragged_batches(data) -> None:
    shape = data.draw(st.sampled_from([SMALL_PAGES, LARGE_PAGES]))
    shape = dataclasses.replace(shape, kv_dtype=data.draw(st.sampled_from(["", *LARGEST])))
    options = {"window": data.draw(st.sampled_from([None, 1, 8, 9])), "soft_cap": None}
    case = make_case(np.random.default_rng(1), shape, data.draw(ragged_sequences(shape)), data.draw(st.integers(0, 2)))
    check(case, **options)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(dtype="bfloat16", head_dim=80, heads=3, kv_heads=1),
        Shape(dtype="bfloat16", kv_dtype="int8", head_dim=96),
        Shape(dtype="bfloat16", kv_dtype="float8_e4m3fn", heads=2),  # a key head for each query head
    ],
    ids=lambda shape: f"{shape.page_dtype}-{shape.head_dim}",
)
def test_prefill_of_narrow_dtypes(shape: Shape) -> None:
    check(make_case(np.random.default_rng(2), shape, [(5, 11), (0, 1), (9, 15)]), window=9)


def test_sequences_may_lie_in_any_order_and_layers_may_be_traced() -> None:
    case = make_case(np.random.default_rng(3), SMALL_PAGES, [(3, 9), (0, 0), (11, 4)], gap=2)
    turned = [np.asarray(array)[::-1] for array in (case.page_table, case.starts, case.lengths, case.prefixes)]
    arguments = (*case.prefill_arguments[:4], jnp.int32(SMALL_PAGES.layer), *map(jnp.asarray, turned))
    out, pages = compiled(*arguments, **PLAIN, **BLOCKS)
    wanted, written = compiled(*case.prefill_arguments, **PLAIN, **BLOCKS)
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(pages.data, written.data)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=4, max_size=4), st.permutations(range(4)))
def test_every_row_is_in_exactly_one_block(sizes, order) -> None:
    rows, tokens = 50, 4
    lengths, gaps = np.array(sizes).T
    starts = np.cumsum(gaps) + np.cumsum(lengths) - lengths
    starts, lengths = starts[list(order)], lengths[list(order)]
    prefixes = np.arange(4) * 10
    batch = (jnp.asarray(array, jnp.int32) for array in (starts, lengths, prefixes))
    table = np.asarray(blocks_by(*batch, rows=rows, tokens=tokens))
    met = np.zeros(rows, int)
    for sequence, first, count, position, keys in table.T:
        assert 0 <= count <= tokens
        met[first : first + count] += 1
        owners = [b for b in range(4) if starts[b] <= first < starts[b] + lengths[b]] if count else []
        if owners:
            assert owners == [sequence]
            assert first + count <= starts[sequence] + lengths[sequence]
            assert position == prefixes[sequence] + first - starts[sequence]
        assert keys == (position + count if owners else 0)
    np.testing.assert_array_equal(met, 1)


def test_heavier_blocks_of_a_sequence_come_first() -> None:
    table = np.asarray(blocks_of(jnp.array([0]), jnp.array([30]), jnp.array([7]), 30, 8))
    np.testing.assert_array_equal(table[4, :4], [37, 31, 23, 15])


def test_pages_that_the_lowering_would_address_wrongly_are_refused() -> None:
    def pages(count: int, dtype: str) -> KVPages:
        return KVPages(jax.ShapeDtypeStruct((count, 32, 2, 8, 64, 128), dtype))  # type: ignore[arg-type]

    for count, dtype in ((512, "int8"), (1025, "int8"), (513, "bfloat16"), (4096, "float32")):
        gpu.refuse_wrapping(pages(count, dtype))
    for count, dtype in ((513, "int8"), (1024, "float8_e4m3fn")):
        with pytest.raises(KernelRefused, match="2 to 4 GiB"):
            gpu.refuse_wrapping(pages(count, dtype))


HOPPER = Shape(dtype="bfloat16", head_dim=64, page_tokens=32, table_pages=7, layers=1, layer=0, kv_heads=1)


@pytest.mark.check_long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("heads", "sequences", "rows", "options"),
    [
        (2, [(190, 9), (0, 3)], 13, {}),  # a ring that comes round; a head for each warpgroup
        (1, [(120, 70)], 70, {"window": 70, "soft_cap": 2.0}),  # tokens for each; the first and last block unclean
    ],
)
def test_the_hopper_body_under_its_interpreter_without_races(heads: int, sequences, rows: int, options) -> None:
    case = make_case(np.random.default_rng(4), dataclasses.replace(HOPPER, heads=heads), sequences)
    queries, keys, values, pages, *rest = case.prefill_arguments
    arguments = (queries[:rows], keys[:rows], values[:rows], pages, *rest)
    interpreter = compat.hopper_interpreter(detect_races=True)
    target = Target("gpu", interpret=True)
    out, written = gpu_mosaic.prefill(*arguments, target=target, block_keys=64, interpret=interpreter, **options)
    wanted, _ = wanted_of(queries[:rows].astype(jnp.float32), *arguments[1:], **options)
    np.testing.assert_allclose(np.asarray(out, np.float32), wanted, atol=bound_of(case, written), rtol=0)


def test_the_hopper_body_says_what_it_has_no_code_for() -> None:
    def problem(
        queries: str = "bfloat16",
        stored: str = "bfloat16",
        head_dim: int = 128,
        page: int = 64,
        block_keys: int = 128,
    ) -> str | None:
        pages = KVPages(jax.ShapeDtypeStruct((9, 2, 2, 8, page, head_dim), stored))  # type: ignore[arg-type]
        return gpu_mosaic.problem_of(jax.ShapeDtypeStruct((99, 32, head_dim), queries), pages, block_keys)  # type: ignore[arg-type]

    assert problem() is None
    assert problem(page=16) is None
    assert problem(page=512) is None
    assert "bfloat16" in (problem(queries="float32") or "")
    assert "int8" in (problem(stored="int8") or "")
    assert "head dimension of 96" in (problem(head_dim=96) or "")
    assert "pages of 48 tokens" in (problem(page=48) or "")
    assert "head dimension of 256" in (problem(head_dim=256) or "")
    assert "64 at a time" in (problem(block_keys=32) or "")
    case = make_case(np.random.default_rng(5), dataclasses.replace(HOPPER, heads=2), [(0, 3)])
    with pytest.raises(KernelRefused, match="interpreter is not asked for"):
        gpu_mosaic.prefill(*case.prefill_arguments, target=Target("gpu", interpret=True))
