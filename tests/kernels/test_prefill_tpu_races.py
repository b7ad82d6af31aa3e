"""Copies of the TPU's prefill under the race detector: none too early, and a wait that is left out is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ragged_cases import Case, Shape, make_case

from mcjax.kernels.prefill import reference, tpu, tpu_attention
from mcjax.kernels.proof.races import races_of
from mcjax.kernels.target import Target

BLOCKS = {"query_tokens": 4, "tile_tokens": 4, "key_tokens": 4}


def case_of(kv_dtype: str) -> Case:
    """Blocks of one and of several of keys, short ones, rows of nobody, pages written in part and as a whole."""
    shape = Shape(heads=2, kv_heads=1, head_dim=8, table_pages=3, layers=1, layer=0, kv_dtype=kv_dtype)
    return make_case(np.random.default_rng(0), shape, [(3, 6), (0, 0), (1, 2)])


def checked(case: Case, copies: str = "on_wait", **options: Any) -> tuple[np.ndarray, list[str]]:
    """Results under the race detector, and what it found. Copies are made when they are waited for, unless "eager"."""

    def call(interpret: Any) -> Any:
        interpret = replace(interpret, dma_execution_mode=copies)
        return tpu.prefill(*case.prefill_arguments, target=Target("tpu"), interpret=interpret, **BLOCKS, **options)

    result, races = races_of(call)
    return np.full(case.queries.shape, np.nan) if result is None else np.asarray(result[0]), races


@pytest.mark.parametrize(("kv_dtype", "window"), [("float32", None), ("int8", 3)])
def test_no_copy_is_looked_at_before_it_is_over(kv_dtype, window) -> None:
    case = case_of(kv_dtype)
    found, races = checked(case, window=window)
    assert races == []
    wanted, _ = reference.prefill(*case.prefill_arguments, window=window)
    np.testing.assert_allclose(found, wanted, atol=4e-6)


def test_a_wait_that_is_left_out_is_found(monkeypatch) -> None:
    """Pages are computed with as soon as their copies have begun."""
    whole = tpu_attention._Kernel.fetch

    class Copy:
        """Whether a copy is started or waited for."""

        waits = False

        def start(self) -> None:
            self.waits = False

        def wait(self) -> None:
            self.waits = True

    def fetch(self, i, j, slot, act) -> None:
        copy = Copy()
        act(copy)
        if not copy.waits:
            whole(self, i, j, slot, act)

    monkeypatch.setattr(tpu_attention._Kernel, "fetch", fetch)
    case = case_of("float32")
    _, races = checked(case, "eager")  # made late, a copy that none waits for is never made, and races with nothing
    assert races != []
    found, _ = checked(case)
    assert np.isnan(found).any()  # what has not arrived is NaN
