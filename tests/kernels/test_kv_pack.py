"""Both bodies of packing and unpacking, interpreted, against the reference: the same bits."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_cases import DTYPES, HEAD_DIM, PAGE_TOKENS, assert_same_bits, bits, filled_pages

from mcjax.errors import KernelRefused
from mcjax.kernels.kv_pack import dispatch, gpu, reference, tpu
from mcjax.kernels.kv_pack.blocks import KVBlocks
from mcjax.kernels.kv_pack.rounding import corrected, quantised, reciprocal
from mcjax.kernels.pages import LARGEST, KVPages, stored
from mcjax.kernels.target import Target

PAGES, KV_HEADS, FIRST, HEADS, SLOTS = 6, 4, 1, 2, 3
TPU, GPU = Target("tpu", interpret=True), Target("gpu", interpret=True)
TARGETS = [pytest.param(TPU, id="tpu"), pytest.param(GPU, id="gpu")]
QUICK = [
    ("float32", "float32"),
    ("bfloat16", "int8"),
    ("float32", "float8_e4m3fn"),
    ("int8", "bfloat16"),
    ("float8_e4m3fn", "float8_e4m3fn"),
]


def jitted(function, **options):
    return jax.jit(partial(function, **options))


def check_both_ways(body, options, page_dtype, block_dtype, layout):
    """Hypothesis draws what does not change a shape, so that each kernel is compiled once."""
    pack = jitted(body.kv_pack, first_head=FIRST, heads=HEADS, dtype=block_dtype, **options, **layout)
    unpack = jitted(body.kv_unpack, first_head=KV_HEADS - HEADS, **options, **layout)
    pack_reference = jitted(reference.kv_pack, first_head=FIRST, heads=HEADS, dtype=block_dtype)
    unpack_reference = jitted(reference.kv_unpack, first_head=KV_HEADS - HEADS)

    @settings(max_examples=5, deadline=None)
    @given(st.integers(0, 2**31), st.permutations(range(PAGES)), st.permutations(range(PAGES)))
    def check(seed, sent, received):
        rng = np.random.default_rng(seed)
        pages, pool = (filled_pages(rng, PAGES, KV_HEADS, page_dtype) for _ in range(2))
        slots, into = jnp.array(sent[:SLOTS]), jnp.array(received[:SLOTS])
        blocks = pack(pages, slots)
        assert_same_bits(blocks, pack_reference(pages, slots))
        changed = unpack(pool, into, blocks)
        assert_same_bits(changed, unpack_reference(pool, into, blocks))
        for before, after in zip(jax.tree.leaves(pool), jax.tree.leaves(changed)):
            for kept in (np.s_[np.array(received[SLOTS:])], np.s_[:, :, :, : KV_HEADS - HEADS]):
                np.testing.assert_array_equal(bits(before)[kept], bits(after)[kept])

    check()


@pytest.mark.parametrize(("page_dtype", "block_dtype"), QUICK)
@pytest.mark.parametrize("target", TARGETS)
def test_the_bits_are_those_of_the_reference_and_all_else_keeps_its_own(target, page_dtype, block_dtype) -> None:
    check_both_ways(dispatch, {"target": target}, page_dtype, block_dtype, {})


@pytest.mark.check_long
@pytest.mark.parametrize(("page_dtype", "block_dtype"), list(itertools.product(DTYPES, DTYPES))[::3])
@pytest.mark.parametrize(
    ("body", "target", "layout"),
    [
        pytest.param(tpu, TPU, {"step_rows": 2}, id="tpu"),
        pytest.param(tpu, TPU, {"layout": "free", "step_rows": 1}, id="tpu-free"),
        pytest.param(gpu, GPU, {"tile_tokens": 8, "tile_heads": 1}, id="gpu"),
        pytest.param(gpu, GPU, {"tile_tokens": 32}, id="gpu-tall"),
    ],
)
def test_any_two_dtypes_and_any_tiles(body, target, layout, page_dtype, block_dtype) -> None:
    check_both_ways(body, {"target": target}, page_dtype, block_dtype, layout)


def test_dma_alone_moves_what_need_not_be_transposed() -> None:
    """More copies than may be on their way at once: 3 slots of 8 rows, a row each."""
    rng = np.random.default_rng(0)
    pages, pool = (filled_pages(rng, PAGES, KV_HEADS, "bfloat16", layers=4) for _ in range(2))
    slots = jnp.array([5, 0, 3])
    options = {"target": TPU, "layout": "free", "step_rows": 1}
    blocks = tpu.kv_pack(pages, slots, first_head=1, heads=3, **options)
    assert_same_bits(blocks, reference.kv_pack(pages, slots, first_head=1, heads=3))
    found = tpu.kv_unpack(pool, slots, blocks, first_head=0, **options)
    assert_same_bits(found, reference.kv_unpack(pool, slots, blocks, first_head=0))


@pytest.mark.parametrize("target", TARGETS)
def test_two_senders_and_four_receivers_have_the_same_whole(target) -> None:
    """Tensor parallelism of 2 to 4 and back: each pair sends the range of heads that both have."""
    rng = np.random.default_rng(1)
    whole = filled_pages(rng, PAGES, 4, "bfloat16")
    senders = [KVPages(whole.data[:, :, :, 2 * rank : 2 * rank + 2]) for rank in range(2)]
    slots, into = jnp.array([4, 1]), jnp.array([0, 2])
    packs = [jitted(dispatch.kv_pack, first_head=first, heads=1, target=target) for first in range(2)]
    unpacks = [jitted(dispatch.kv_unpack, first_head=first, target=target) for first in range(2)]
    nothing = KVPages.filled(3, 1, 1, PAGE_TOKENS, HEAD_DIM, "bfloat16", float("nan"))
    receivers = [unpacks[0](nothing, into, packs[rank % 2](senders[rank // 2], slots)) for rank in range(4)]
    for rank, received in enumerate(receivers):
        np.testing.assert_array_equal(bits(received.data[into]), bits(whole.data[slots][:, :, :, rank : rank + 1]))
        assert np.isnan(received.data[1].astype(jnp.float32)).all()
    back = KVPages.filled(PAGES, 1, 2, PAGE_TOKENS, HEAD_DIM, "bfloat16", float("nan"))
    for sender in range(2):
        returned = back
        for part in range(2):
            returned = unpacks[part](returned, slots, packs[0](receivers[2 * sender + part], into))
        np.testing.assert_array_equal(bits(returned.data[slots]), bits(senders[sender].data[slots]))


@pytest.mark.parametrize(("dtype", "bound"), [("int8", 0.5 / 127), ("float8_e4m3fn", 2.0**-4)])
@pytest.mark.parametrize("target", TARGETS)
def test_a_round_trip_through_quantised_blocks_stays_within_the_bound(target, dtype, bound) -> None:
    """Of the vector's largest number: half a step of int8; half of the last of fp8's three bits."""
    values = np.random.default_rng(2).normal(size=(2, 1, 2, 2, PAGE_TOKENS, HEAD_DIM)).astype(np.float32)
    pages, slots = KVPages(jnp.asarray(values)), jnp.array([1, 0])
    blocks = dispatch.kv_pack(pages, slots, dtype=dtype, target=target)
    nothing = KVPages.filled(2, 1, 2, PAGE_TOKENS, HEAD_DIM, "float32", float("nan"))
    back = np.asarray(dispatch.kv_unpack(nothing, slots, blocks, target=target).data)
    largest = np.abs(values).max(axis=-1, keepdims=True)
    assert (np.abs(back - values) <= largest * bound * (1 + 1e-6)).all()
    assert (back != values).any()


def test_a_reciprocal_is_the_nearest_whatever_quotient_it_starts_from() -> None:
    """Every significand, from quotients that are up to 32 units in the last place off."""
    numbers = (np.arange(2**23, dtype=np.uint32) | np.uint32(0x3F800000)).view(np.float32)
    nearest = np.float32(1) / numbers
    correct = jax.jit(corrected)
    for off in (-32, -1, 0, 2, 32):
        quotients = (nearest.view(np.int32) + off).view(np.float32)
        np.testing.assert_array_equal(correct(numbers, quotients), nearest)
    sizes = np.exp2(np.arange(-125, 122, dtype=np.float32))[:, None] * numbers[:: 2**17]
    np.testing.assert_array_equal(jax.jit(reciprocal)(sizes), np.float32(1) / sizes)


@pytest.mark.parametrize("dtype", list(LARGEST))
def test_rounding_inside_kernels_is_that_of_the_pages(dtype) -> None:
    """Random bits, ties and numbers that are subnormal in the dtype."""
    rng = np.random.default_rng(3)
    anything = rng.integers(0, 2**32, size=(20_000, HEAD_DIM), dtype=np.uint32).view(np.float32)
    anything = np.where(np.isfinite(anything) | (rng.random(anything.shape) < 1e-3), anything, np.float32(1.5))
    ties = np.arange(-254, 255) / 2 * np.exp2(np.arange(-20.0, 20.0))[:, None]
    ties[:, 0] = LARGEST[dtype] * np.exp2(np.arange(-20, 20))
    small = rng.normal(size=(20_000, HEAD_DIM)) * np.exp2(rng.integers(-20, 0, size=(20_000, HEAD_DIM)))
    for values in (anything, ties.astype(np.float32), small.astype(np.float32)):
        numbers, scales = jax.jit(quantised, static_argnums=1)(values, dtype)
        wanted, wanted_scales = stored(jnp.asarray(values), dtype)
        np.testing.assert_array_equal(bits(numbers), bits(wanted))
        np.testing.assert_array_equal(scales[:, 0], wanted_scales)


@pytest.mark.parametrize("dtype", list(LARGEST))
@pytest.mark.parametrize("head_dim", [16, 64, 256])
def test_one_number_that_is_none_makes_none_of_the_whole_vector(dtype, head_dim) -> None:
    values = np.random.default_rng(4).normal(size=(8, head_dim)).astype(np.float32)
    values[np.arange(8), np.arange(8) * 2] = np.array([np.nan, -np.nan, np.inf, -np.inf] * 2)
    for scales in (stored(jnp.asarray(values), dtype)[1], quantised(jnp.asarray(values), dtype)[1][:, 0]):
        assert np.isnan(scales).all()


def test_no_slots_are_no_blocks() -> None:
    pages = KVPages.filled(2, 1, 1, PAGE_TOKENS, HEAD_DIM, "bfloat16")
    slots = jnp.zeros(0, jnp.int32)
    blocks = dispatch.kv_pack(pages, slots, dtype="int8", target=TPU)
    assert blocks.data.shape == (0, 1, 2, PAGE_TOKENS, 1, HEAD_DIM)
    assert dispatch.kv_unpack(pages, slots, blocks, target=TPU) is pages


def shaped(dtype, pages=4, layers=1, kv_heads=2, page_tokens=16, head_dim=128):
    shape = (pages, layers, 2, kv_heads, page_tokens, head_dim)
    struct: Any = jax.ShapeDtypeStruct
    return KVPages(struct(shape, dtype), struct(shape[:-1], jnp.float32) if dtype in LARGEST else None)


@pytest.mark.parametrize(
    ("pages", "options", "said"),
    [
        (shaped("bfloat16"), {"first_head": 1, "heads": 2}, r"heads 1 to 3 are not among the 2"),
        (shaped("bfloat16"), {"first_head": 2}, r"heads 2 to 2 .* choose a range of one head or more"),
        (shaped("uint16"), {"dtype": "int8"}, r"pages of uint16 and blocks of int8; use one dtype for both"),
        (
            shaped("float32", kv_heads=64, page_tokens=512, head_dim=256),
            {"target": Target("tpu", "TPU v5 lite")},
            r"bytes of VMEM are needed .*134,217,728.*lower page_tokens",
        ),
        (
            shaped("int8", pages=2**17, layers=2, kv_heads=4),
            {"target": Target("gpu", "NVIDIA H200"), "dtype": "bfloat16"},
            r"addresses an array of 4,294,967,296 bytes wrongly.*take fewer or more pages",
        ),
    ],
)
def test_what_no_body_does_is_refused_with_the_way_out(pages, options, said) -> None:
    pack = partial(dispatch.kv_pack, **{"target": TPU} | options)
    with pytest.raises(KernelRefused, match=said):
        jax.eval_shape(pack, pages, jax.ShapeDtypeStruct((3,), jnp.int32))


def test_blocks_with_more_heads_than_the_pages_are_refused() -> None:
    blocks = KVBlocks(jnp.zeros((1, 1, 2, PAGE_TOKENS, 2, HEAD_DIM)))
    pages = KVPages.filled(2, 1, 2, PAGE_TOKENS, HEAD_DIM, "float32")
    with pytest.raises(KernelRefused, match="heads 1 to 3"):
        dispatch.kv_unpack(pages, jnp.array([0]), blocks, first_head=1, target=GPU)
