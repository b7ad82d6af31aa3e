"""Decode's page copies under the interpreter that makes them late and looks for races."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from ragged_cases import Shape, decode_case

from mcjax.kernels.decode import reference, tpu
from mcjax.kernels.proof.races import races_of
from mcjax.kernels.target import Target

TARGET = Target("tpu", interpret=True)
# Rows without work before, between and after; several blocks; a last block that is not full.
ROWS = [(0, 0), (9, 1), (4, 0), (5, 2), (12, 1), (3, 0)]


def run(shape: Shape, copies: str = "on_wait", **options) -> tuple[tuple, tuple[tuple, list[str]]]:
    arguments = decode_case(np.random.default_rng(0), shape, ROWS, 2)

    def call(interpret):
        interpret = replace(interpret, dma_execution_mode=copies)
        return tpu.decode(*arguments, target=TARGET, interpret=interpret, **options)

    found = races_of(call)
    plain = {name: value for name, value in options.items() if name == "window"}
    return jax.jit(partial(reference.decode, **plain), static_argnums=2)(*arguments), found


@pytest.mark.parametrize(
    ("kv_dtype", "options"),
    [("float32", {"block_pages": 1, "splits": 2}), ("int8", {"block_pages": 2, "window": 6})],
)
def test_no_copy_races_with_its_use(kv_dtype, options) -> None:
    shape = Shape(2, 1, 8, table_pages=3, layers=1, layer=0, kv_dtype=kv_dtype)
    wanted, ((mixed, logs), races) = run(shape, **options)
    assert races == []
    # Copies are made only when they are waited for here, and unwritten memory is NaN: the numbers show a wait too few.
    np.testing.assert_allclose(mixed, wanted[0], atol=3e-6)
    np.testing.assert_allclose(logs, wanted[1], atol=3e-6)


def test_a_wait_that_is_missing_is_found(monkeypatch) -> None:
    class Hasty:
        """A copy that nobody waits for."""

        def __init__(self, copy):
            self.start = copy.start

        def wait(self) -> None:
            pass

    copy = pltpu.make_async_copy
    monkeypatch.setattr(tpu.pltpu, "make_async_copy", lambda *refs: Hasty(copy(*refs)))
    # Copies are made at once: nobody waits for them, so otherwise they would never be, and there would be no race.
    _, (_, races) = run(Shape(2, 1, 8, table_pages=3, layers=1, layer=0), "eager", block_pages=2)
    assert races
