"""Decode's body for TPUs, interpreted, against the definition in float32 over the same stored numbers."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_cases import Shape, decode_case, edge_sizes

from mcjax.errors import KernelRefused
from mcjax.kernels.decode import dispatch, reference, tpu
from mcjax.kernels.decode.merge import merge
from mcjax.kernels.pages import KVPages, stored
from mcjax.kernels.target import Target

INTERPRETED = Target("tpu", interpret=True)
ROWS = 4
ROUNDING = {"float32": 2e-6, "bfloat16": 2.0**-7}
"""Of a result, as a part of the largest value: the order of sums; in bfloat16 weights are rounded (by 2**-8 at most),
then the result is (by 2**-8)."""


@cache
def compiled(**options):
    """Body and definition for one set of options: every draw of a test goes through the same program."""
    plain = {name: value for name, value in options.items() if name in ("window", "soft_cap", "scale")}
    body = jax.jit(partial(tpu.decode, target=INTERPRETED, **options), static_argnames="layer")
    return body, jax.jit(partial(reference.decode, **plain), static_argnames="layer")


def check(arguments: tuple, firsts=None, **options) -> tuple[jax.Array, jax.Array]:
    """Compares the body with the definition, and returns what the body gave."""
    body, definition = compiled(**options)
    queries, pages, layer, *rest = arguments
    firsts = jnp.zeros(len(queries), jnp.int32) if firsts is None else firsts
    mixed, logs = body(queries, pages, layer, *rest, firsts)
    wanted, wanted_logs = definition(queries.astype(jnp.float32), pages, layer, *rest, firsts)
    assert mixed.dtype == queries.dtype
    assert logs.dtype == jnp.float32
    values = np.asarray(pages.read(layer, rest[0]))[:, 1]
    largest = np.nanmax(np.abs(values), initial=0, where=~np.isnan(values))
    bound = ROUNDING[queries.dtype.name] * max(largest, 1.0)
    np.testing.assert_allclose(np.asarray(mixed, np.float32), wanted, rtol=0, atol=bound)
    np.testing.assert_allclose(logs, wanted_logs, rtol=2e-6, atol=3e-6)
    return mixed, logs


@st.composite
def ragged_rows(draw: st.DrawFn, shape: Shape, width: int) -> list[tuple[int, int]]:
    """(context, query tokens) of `ROWS` rows; some are padding."""
    most = shape.table_pages * shape.page_tokens
    found: list[tuple[int, int]] = []
    for _ in range(ROWS):
        context = draw(edge_sizes(shape.page_tokens, most))
        found.append((context, draw(st.integers(0, min(width, context)))))
    return found


@pytest.mark.parametrize(
    ("shape", "width", "options"),
    [
        (Shape(), 3, {"block_pages": 2}),
        (Shape(heads=2, head_dim=80), 1, {"block_pages": 1, "splits": 3}),  # as many key heads as query heads
        (Shape(heads=5, kv_heads=1, layers=1, layer=0), 4, {"block_pages": 4, "window": 5, "soft_cap": 2.0}),
        (Shape(heads=3, kv_heads=1, dtype="bfloat16"), 2, {"block_pages": 3, "window": 1}),
        (Shape(dtype="bfloat16", kv_dtype="int8"), 2, {"block_pages": 2, "splits": 2, "window": 9}),
        (Shape(heads=4, kv_heads=1, kv_dtype="float8_e4m3fn"), 2, {"scale": 0.5}),
    ],
)
def test_is_the_definition_for_any_ragged_batch(shape, width, options) -> None:
    @settings(max_examples=8, deadline=None)
    @given(ragged_rows(shape, width), st.integers(0, 99))
    def run(rows, seed) -> None:
        check(decode_case(np.random.default_rng(seed), shape, rows, width), **options)

    run()


@pytest.mark.check_long
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("width", "options"), [(1, {}), (4, {"window": 33, "soft_cap": 30.0, "splits": 2, "block_pages": 2})]
)
def test_is_the_definition_at_real_head_dims(kv_dtype, head_dim, width, options) -> None:
    page_tokens, dtype = 32 if jnp.dtype(kv_dtype).itemsize == 1 else 16, "bfloat16"
    if kv_dtype == "float32":
        dtype = kv_dtype
    shape = Shape(8, 2, head_dim, page_tokens, dtype=dtype, kv_dtype=kv_dtype)

    @settings(max_examples=6, deadline=None)
    @given(ragged_rows(shape, width), st.integers(0, 99))
    def run(rows, seed) -> None:
        check(decode_case(np.random.default_rng(seed), shape, rows, width), **options)

    run()


def test_shards_of_a_context_merge_to_the_whole() -> None:
    window, shape, rows = 7, Shape(), [(24, 3), (13, 2), (12, 1), (5, 3)]
    queries, pages, layer, table, *rest = decode_case(np.random.default_rng(3), shape, rows, 3)
    whole, whole_logs = compiled(window=window)[1](queries, pages, layer, table, *rest)
    parts = []
    for first in (0, 3):
        firsts = jnp.full(len(rows), first * shape.page_tokens, jnp.int32)
        shard = (queries, pages, layer, table[:, first : first + 3], *rest)
        parts.append(check(shard, firsts, block_pages=2, window=window))
    merged, logs = merge(jnp.stack([mixed for mixed, _ in parts]), jnp.stack([logs for _, logs in parts]))
    np.testing.assert_allclose(merged, whole, atol=3e-6)
    np.testing.assert_allclose(logs, whole_logs, atol=3e-6)


@pytest.mark.parametrize(("kv_dtype", "step"), [("int8", 1 / 254), ("float8_e4m3fn", 2.0**-4)])
def test_quantised_pages_are_as_near_to_the_true_numbers_as_their_rounding_allows(kv_dtype, step) -> None:
    """A stored number is off by at most `step` of its vector's largest. If no score is off by more than d, no softmax
    weight is by more than a factor of exp(2 d), so no result by more than the values are plus (exp(2 d) - 1) of the
    largest value."""
    shape, rng, page = Shape(heads=2, kv_heads=1, kv_dtype=kv_dtype), np.random.default_rng(4), Shape().page_tokens
    true = jnp.asarray(rng.normal(size=(10, 2, 2, shape.kv_heads, page, shape.head_dim)), jnp.float32)
    table = jnp.arange(6, dtype=jnp.int32)[None]
    queries = jnp.asarray(rng.normal(size=(1, 1, shape.heads, shape.head_dim)), jnp.float32)
    rest = (shape.layer, table, jnp.array([24]), jnp.array([1]))
    pages = KVPages(*stored(true, kv_dtype))
    exact, near = (np.asarray(pages.read(shape.layer, table[0])) for pages in (KVPages(true), pages))  # [2, S, Hkv, D]
    assert (np.abs(near - exact) <= step * 1.001 * np.abs(exact).max(axis=-1, keepdims=True)).all()
    grouped = np.asarray(queries[0, 0]).reshape(shape.kv_heads, -1, shape.head_dim)
    off = np.abs(np.einsum("kgd,skd->kgs", grouped, near[0] - exact[0])).max() * shape.head_dim**-0.5
    bound = np.abs(near[1] - exact[1]).max() + np.expm1(2 * off) * np.abs(exact[1]).max()
    body, definition = compiled()
    wanted, _ = definition(queries, KVPages(true), *rest)
    mixed, _ = body(queries, pages, *rest)
    assert 0 < np.abs(mixed - wanted).max() <= bound


def test_a_visible_nan_is_not_hidden() -> None:
    queries, pages, *rest = decode_case(np.random.default_rng(5), Shape(), [(24, 3)] * ROWS, 3)
    table = rest[1]
    spoilt = KVPages(pages.data.at[table[0, 2], 1, 1, 0, 1, 3].set(jnp.nan))
    mixed, _ = compiled(block_pages=2)[0](queries, spoilt, *rest, jnp.zeros(ROWS, jnp.int32))
    assert np.isnan(mixed[0, 0, :2, 3]).all()  # the query heads of key head 0
    assert not np.isnan(mixed[0, 0, 2:]).any()
    assert not np.isnan(mixed[1]).any()


def test_dispatch_takes_the_body_of_the_platform_and_says_why_arrays_do_not_fit() -> None:
    arguments = decode_case(np.random.default_rng(6), Shape(heads=1, kv_heads=1), [(9, 2), (0, 0)], 2)
    mixed, logs = dispatch.decode(*arguments, target=INTERPRETED)
    wanted, wanted_logs = compiled()[1](*arguments)
    np.testing.assert_allclose(mixed, wanted, atol=3e-6)
    np.testing.assert_allclose(logs, wanted_logs, atol=3e-6)
    arguments = decode_case(np.random.default_rng(6), Shape(), [(9, 2), (0, 0)], 2)
    queries, pages, layer, table, *rest = arguments
    with pytest.raises(KernelRefused, match="3 query heads over 2 key heads"):
        dispatch.decode(queries[:, :, :3], pages, layer, table, *rest, target=INTERPRETED)
    with pytest.raises(KernelRefused, match="head dimension 16; queries have 8"):
        dispatch.decode(queries[..., :8], pages, layer, table, *rest, target=INTERPRETED)
    with pytest.raises(KernelRefused, match="page_table of 1 rows"):
        dispatch.decode(queries, pages, layer, table[:1], *rest, target=INTERPRETED)


def test_blocks_that_vmem_has_no_room_for_are_refused_with_what_to_lower() -> None:
    shape = jax.ShapeDtypeStruct
    pages = jax.eval_shape(lambda: KVPages.filled(64, 1, 8, 128, 128, jnp.bfloat16))
    rest = (shape((4, 256), jnp.int32), shape((4,), jnp.int32), shape((4,), jnp.int32))

    def lowered(kind: str, **options) -> None:
        body = partial(tpu.decode, layer=0, target=Target("tpu", kind), **options)
        jax.eval_shape(
            lambda queries, pages, table, contexts, lengths: body(
                queries, pages, page_table=table, contexts=contexts, lengths=lengths
            ),
            shape((4, 1, 32, 128), jnp.bfloat16),
            pages,
            *rest,
        )

    lowered("TPU v6 lite")
    lowered("TPU v4")  # what is tuned fits the smallest
    with pytest.raises(KernelRefused) as refused:
        lowered("TPU v6 lite", block_pages=128)
    for said in ("TPU v6 lite has 134,217,728", "two blocks of pages 134,217,728", "lower block_pages"):
        assert said in str(refused.value)
    with pytest.raises(KernelRefused, match="67,108,864"):
        lowered("TPU7x", block_pages=64)
