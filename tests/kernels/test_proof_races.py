"""The race detector: a copy that is waited for is clean, one that is read too early is found."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mcjax.kernels.proof.races import races_of


def copied(x, interpret, waits):
    """`x + 1`, by a copy into VMEM that is waited for before it is read, or only after."""

    def body(x_ref, out_ref, buffer, semaphore):
        copy = pltpu.make_async_copy(x_ref, buffer, semaphore)
        copy.start()
        if waits:
            copy.wait()
        out_ref[...] = buffer[...] + 1
        if not waits:
            copy.wait()

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
        interpret=interpret,
    )(x)


def test_a_copy_that_is_waited_for_is_no_race() -> None:
    out, races = races_of(lambda interpret: copied(jnp.ones((8, 128)), interpret, waits=True))
    assert races == []
    np.testing.assert_array_equal(out, np.full((8, 128), 2.0))


def test_a_missing_wait_is_found_and_named() -> None:
    _, races = races_of(lambda interpret: copied(jnp.ones((8, 128)), interpret, waits=False))
    assert races
    assert "test_proof_races.py" in races[0]
    # The next kernel is not blamed for it.
    assert races_of(lambda interpret: copied(jnp.ones((8, 128)), interpret, waits=True))[1] == []


def test_other_errors_are_not_taken_for_races() -> None:
    with pytest.raises(ZeroDivisionError):
        races_of(lambda interpret: 1 // 0)
