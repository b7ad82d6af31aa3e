"""int8 weights: how far a number may be off, that products are those of the weight it stands for, and whole models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcjax.cost.formulas import weight_read_bytes
from mcjax.cost.parameters import parameters
from mcjax.errors import ConfigError
from mcjax.models import builtin
from mcjax.models.layers import linear
from mcjax.models.layers.linear import einsum
from mcjax.models.quantised import QuantArray, quantise

# Sizes unlike each other; what is summed over comes first, last, and behind a batch.
PRODUCTS = [
    ("bte,ekgd->btkgd", (2, 3, 16), (16, 3, 4, 5), (0,)),
    ("bthd,hde->bte", (2, 3, 4, 6), (4, 6, 10), (0, 1)),
    ("be,ve->bv", (3, 8), (13, 8), (1,)),
    ("bthn,hnr->bthr", (2, 3, 4, 6), (4, 6, 5), (1,)),
    ("xce,xehf->xchf", (3, 4, 6), (3, 6, 2, 5), (1,)),
    ("bthr,hrd->bhtd", (2, 3, 4, 6), (4, 6, 5), (1,)),
]


def random(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@given(st.integers(0, 2**32), st.sampled_from([(1, 4), (9, 5)]), st.floats(-30, 30), st.sampled_from([(0,), (1,)]))
def test_no_number_is_further_off_than_half_a_step_of_its_channel(
    seed: int, shape: tuple[int, int], exponent: float, summed: tuple[int, ...]
) -> None:
    weight = random(seed, shape) * np.float32(2) ** random(seed + 1, shape) * np.float32(2**exponent)
    found = quantise(jnp.asarray(weight), summed)
    assert found.scales.shape == tuple(1 if at in summed else size for at, size in enumerate(weight.shape))
    off = np.abs(np.asarray(found.numbers, np.float64) * np.asarray(found.scales, np.float64) - weight)
    largest = np.abs(weight).max(axis=summed, keepdims=True)
    assert (off <= largest / 254 * (1 + 1e-5)).all()
    # The largest of each channel is hit, whichever sign it has.
    assert (np.abs(np.asarray(found.numbers)).max(axis=summed) == 127).all()


def test_channels_of_zeros_stay_zeros() -> None:
    found = quantise(jnp.zeros((4, 3)), (0,))
    assert not np.asarray(found.plain(jnp.float32)).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("flat", "block"), [(True, None), (True, 24), (True, 1000), (False, None)], ids=str)
@pytest.mark.parametrize(("spec", "of_x", "of_weight", "summed"), PRODUCTS)
def test_products_are_those_of_the_weight_it_stands_for(
    spec: str, of_x: Any, of_weight: Any, summed: Any, block: int | None, flat: bool, dtype: str, monkeypatch: Any
) -> None:
    if block is not None:
        monkeypatch.setattr(linear, "BLOCK_NUMBERS", block)
        monkeypatch.setattr(linear, "SMALL_NUMBERS", 0)
    x = jnp.asarray(random(1, of_x), dtype)
    weight = quantise(jnp.asarray(random(2, of_weight)), summed)
    found = einsum(spec, x, weight, flat)
    assert found.dtype == jnp.float32
    wide = np.asarray(weight.numbers, np.float64) * np.asarray(weight.scales, np.float64)
    wanted = np.einsum(spec, np.asarray(x, np.float64), wide)
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-6 * np.abs(wanted).max())


def test_a_model_holds_int8_where_it_says_and_counts_so() -> None:
    shape = replace(builtin.DEFAULT_SHAPE, quantisation="int8")
    model = builtin.build(shape, max_positions=8)
    assert isinstance(model.embedding[...], QuantArray)
    assert isinstance(model.blocks[0].attention.mix[...], QuantArray)
    assert isinstance(model.final_norm.gain[...], jax.Array)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(model)) - model.rotary[...].nbytes
    assert held == shape.weight_bytes
    assert weight_read_bytes(builtin.DEFAULT_SHAPE, 1) == 4 * weight_read_bytes(shape, 1)
    declared = parameters(shape)
    assert not any(declared[name].summed for name in declared if name.endswith("gain"))


def test_its_name_is_another_and_what_is_no_quantisation_is_refused() -> None:
    plain = builtin.DEFAULT_SHAPE
    assert builtin.fingerprint(plain, 0) != builtin.fingerprint(replace(plain, quantisation="int8"), 0)
    with pytest.raises(ConfigError, match=r"model\.quantisation=int4: .*; allowed: none, int8"):
        replace(plain, quantisation="int4")
