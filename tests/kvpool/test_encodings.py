"""Encodings at rest: how far off a number may come back, what is refused, and that sizes are a function of layout."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mcjax.errors import ConfigError, Unencodable
from mcjax.kvpool.encodings.base import BlockLayout, Quantised, from_float32, to_float32
from mcjax.kvpool.encodings.named import MAKERS, packer_of

WIDTH = 8
LAYOUTS = [BlockLayout("float32", 2, 3, WIDTH), BlockLayout("bfloat16", 2, 3, WIDTH)]
layouts = st.sampled_from(LAYOUTS)
numbers = arrays(np.float32, (6, WIDTH), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))


def block_of(values: np.ndarray, layout: BlockLayout) -> np.ndarray:
    """Bytes of a block of these numbers, as far as its dtype has them."""
    dtype = np.float32 if layout.dtype == "float32" else ml_dtypes.bfloat16
    limit = float(ml_dtypes.finfo(dtype).max)
    return np.clip(values, -limit, limit).astype(dtype).reshape(-1).view(np.uint8)


def there_and_back(name: str, layout: BlockLayout, block: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Before, after, and the scale of each vector, all float64 (`[V, W]`, `[V, W]`, `[V, 1]`)."""
    packer = packer_of(name, layout, "key")
    assert isinstance(packer, Quantised)
    packed = packer.pack(block)
    assert packed.shape == (packer.packed_bytes,)
    scales, _ = packer.parts(packed)
    back = packer.unpack(packed)
    assert back.shape == (layout.block_bytes,)
    after = to_float32(back, layout).astype(np.float64)
    return to_float32(block, layout).astype(np.float64), after, scales.astype(np.float64)[:, None]


def rounding(values: np.ndarray, layout: BlockLayout) -> np.ndarray:
    """What rounding to the block's dtype, and float32's inside the encoding, may add."""
    relative = 2.0**-22 if layout.dtype == "float32" else 2.0**-8
    return np.abs(values) * relative


@given(numbers, layouts)
def test_int8_is_off_by_at_most_half_a_scale(values, layout):
    before, after, scale = there_and_back("int8", layout, block_of(values, layout))
    largest = np.abs(before).max(axis=1, keepdims=True)
    assert (scale <= np.maximum(largest / 127 * (1 + 1e-6), 2.0**-125)).all(), "no coarser than the vector's range"
    assert (np.abs(before - after) <= scale / 2 * (1 + 2e-5) + rounding(after, layout)).all()


@given(numbers, layouts)
def test_fp8_is_off_by_at_most_a_sixteenth_or_half_its_smallest_step(values, layout):
    before, after, scale = there_and_back("fp8", layout, block_of(values, layout))
    largest = np.abs(before).max(axis=1, keepdims=True)
    assert (scale <= np.maximum(largest / 448 * (1 + 1e-6), 2.0**-116)).all()
    bound = np.maximum(np.abs(before) * 2.0**-4, scale * 2.0**-10)
    assert (np.abs(before - after) <= bound * (1 + 2e-5) + rounding(after, layout)).all()
    assert (np.abs(before - after)[np.abs(before) < scale * 2.0**-6 * 0.99] <= 1.001 * 2.0**-10 * scale.max()).all()


@given(numbers, layouts, st.sampled_from(["int8", "fp8"]))
def test_packing_again_what_came_back_changes_no_more_than_packing_once(values, layout, name):
    """A block that is promoted and saved again keeps to the bound: it does not drift away pass by pass."""
    before, once, scale = there_and_back(name, layout, block_of(values, layout))
    _, twice, _ = there_and_back(name, layout, from_float32(once.astype(np.float32), layout))
    step = scale / 2 if name == "int8" else np.maximum(np.abs(before) * 2.0**-4, scale * 2.0**-10)
    assert (np.abs(once - twice) <= step * 1.1 + 2 * rounding(before, layout)).all()


@given(numbers, layouts)
def test_none_changes_nothing(values, layout):
    packer = packer_of("none", layout, "key")
    block = block_of(values, layout)
    assert packer.pack(block).tobytes() == block.tobytes()
    assert packer.unpack(packer.pack(block)).tobytes() == block.tobytes()
    assert not packer.lossy


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.dtype)
def test_zeros_signs_and_a_vectors_largest_number_come_back_as_they_were(name, layout):
    values = np.zeros((6, WIDTH), np.float32)
    values[1] = [0, -1, 1, 0, 0, 0, 0, 0]
    values[2, 3] = -448.0
    values[3] = 2.0**-140
    before, after, _ = there_and_back(name, layout, block_of(values, layout))
    np.testing.assert_allclose(after[:3], before[:3], rtol=2.0**-7)
    assert not after[3].any(), "smaller numbers than any scale are zero"


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.dtype)
def test_numbers_with_no_place_are_refused_and_what_was_never_written_stays_so(name, layout):
    packer = packer_of(name, layout, "key")
    fine = np.ones((6, WIDTH), np.float32)
    for bad in (np.nan, np.inf, -np.inf):
        values = fine.copy()
        values[4, 2] = bad
        with pytest.raises(Unencodable, match=rf"{name} has no NaN and no infinity, and 1 vectors .*first: 4"):
            packer.pack(block_of(values, layout) if np.isnan(bad) else infinite(values, layout))
    values = fine.copy()
    values[4] = np.nan
    _, after, _ = there_and_back(name, layout, block_of(values, layout))
    assert np.isnan(after[4]).all()
    assert (after[[0, 1, 2, 3, 5]] == 1).all()
    poison = np.full(layout.block_bytes, 0xFF, np.uint8)
    assert np.isnan(there_and_back(name, layout, poison)[1]).all()


def infinite(values: np.ndarray, layout: BlockLayout) -> np.ndarray:
    dtype = np.float32 if layout.dtype == "float32" else ml_dtypes.bfloat16
    return values.astype(dtype).reshape(-1).view(np.uint8)


@given(arrays(np.uint32, (64,), elements=st.integers(0, 2**32 - 1)))
def test_rounding_to_bfloat16_is_to_the_nearest_even(words):
    layout = BlockLayout("bfloat16", 1, 8, WIDTH)
    values = words.view(np.float32).reshape(8, WIDTH)
    with np.errstate(invalid="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    found = to_float32(from_float32(values, layout), layout)
    np.testing.assert_array_equal(found, expected)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 256), st.sampled_from(["float32", "bfloat16"]))
def test_sizes_are_a_function_of_layout(tokens, rows, width, dtype):
    layout = BlockLayout(dtype, tokens, rows, width)
    itemsize = {"float32": 4, "bfloat16": 2}[dtype]
    for name in MAKERS:
        packer = packer_of(name, layout, "key")
        assert (packer.name, packer.block_bytes) == (name, tokens * rows * width * itemsize)
        assert packer.packed_bytes == (packer.block_bytes if name == "none" else tokens * rows * (width + 4))


def test_what_is_no_encoding_or_layout_is_named():
    with pytest.raises(ConfigError, match=r"kvpool\.encoding\.ssd=int4: is no encoding; allowed: none, int8, fp8"):
        packer_of("int4", LAYOUTS[0], "kvpool.encoding.ssd")
    with pytest.raises(ConfigError, match="dtype=float8"):
        BlockLayout("float8", 1, 1, 1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="width=0"):
        BlockLayout("float32", 1, 1, 0)
