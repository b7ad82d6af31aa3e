"""The TPU's bodies under the race detector: unwritten memory is NaN, and copies come as late as they may."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packing_cases import assert_same_bits, filled_pages

from mcjax.kernels.kv_pack import reference, tpu
from mcjax.kernels.proof.races import races_of
from mcjax.kernels.target import Target

TARGET = Target("tpu", interpret=True)
SLOTS = jnp.array([2, 0])


def both_ways(interpret, page_dtype, block_dtype, layout):
    """What was packed, and what those blocks make of another pool; two slots of two rows, a row a step."""
    options = {"target": TARGET, "step_rows": 1, "layout": layout, "interpret": interpret}
    pages, pool = (filled_pages(np.random.default_rng(seed), 3, 3, page_dtype) for seed in range(2))
    blocks = tpu.kv_pack(pages, SLOTS, first_head=1, heads=2, dtype=block_dtype, **options)
    return blocks, tpu.kv_unpack(pool, SLOTS[::-1], blocks, first_head=0, **options)


def expected(page_dtype, block_dtype):
    pages, pool = (filled_pages(np.random.default_rng(seed), 3, 3, page_dtype) for seed in range(2))
    blocks = reference.kv_pack(pages, SLOTS, first_head=1, heads=2, dtype=block_dtype)
    return blocks, reference.kv_unpack(pool, SLOTS[::-1], blocks, first_head=0)


@pytest.mark.parametrize(
    ("page_dtype", "block_dtype", "layout"),
    [
        ("float32", "float32", "free"),
        ("bfloat16", "int8", "default"),
        ("int8", "int8", "free"),
        pytest.param("bfloat16", "bfloat16", "default", marks=pytest.mark.check_long),
        pytest.param("int8", "bfloat16", "default", marks=pytest.mark.check_long),
        pytest.param("float8_e4m3fn", "int8", "free", marks=pytest.mark.check_long),
    ],
)
def test_no_races_and_the_bits_of_the_reference(page_dtype, block_dtype, layout) -> None:
    found, races = races_of(lambda interpret: both_ways(interpret, page_dtype, block_dtype, layout))
    assert races == []
    for one, other in zip(found, expected(page_dtype, block_dtype), strict=True):
        assert_same_bits(one, other)


class LateWait:
    """`pltpu` with one wait of `_converted` put off: that for what a step is about to read, until it has been read."""

    FETCHED, SENT = 2, 4
    """Of the copies in the order in which the body names them: the one waited for, and the one started afterwards."""

    def __init__(self, pltpu):
        self.pltpu = pltpu
        self.named = []

    def __getattr__(self, name):
        return getattr(self.pltpu, name)

    def make_async_copy(self, *ends):
        copy = self.pltpu.make_async_copy(*ends)
        self.named.append(copy)
        match len(self.named) - 1:
            case self.FETCHED:
                return SimpleNamespace(start=copy.start, wait=lambda: None)
            case self.SENT:
                return SimpleNamespace(start=lambda: (self.named[self.FETCHED].wait(), copy.start()), wait=copy.wait)
        return copy


def test_a_wait_that_comes_late_is_found(monkeypatch) -> None:
    """What `interpret=True` would not show: it makes every copy at once."""
    pages = filled_pages(np.random.default_rng(0), 3, 2, "float32")
    monkeypatch.setattr(tpu, "pltpu", LateWait(tpu.pltpu))

    def pack(interpret):
        return tpu.kv_pack(pages, SLOTS, target=TARGET, step_rows=1, interpret=interpret)

    assert_same_bits(pack(True), reference.kv_pack(pages, SLOTS))
    monkeypatch.setattr(tpu, "pltpu", LateWait(tpu.pltpu.pltpu))  # pyright: ignore[reportAttributeAccessIssue]
    found, races = races_of(pack)
    assert races
    if found is not None:  # the release of jax prints the race, and hands on what came of it
        assert not np.array_equal(
            np.asarray(jax.tree.leaves(found)[0]), np.asarray(reference.kv_pack(pages, SLOTS).data), equal_nan=True
        )
