"""Noise is a function of its arguments: repeatable, split exactly, unbiased, and hidden from estimates."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.cost.catalogue import fitted
from mcjax.cost.noisy import Noisy, perturbed
from mcjax.errors import ConfigError

CLEAN = fitted()
NOISY = Noisy(CLEAN, 0.2, 7)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 300), st.integers(0, 4_000_000), st.integers(1, 64))
def test_macro_steps_split_exactly(batch: int, context: int, steps: int) -> None:
    together = NOISY.step_ns(batch, context, steps)
    assert (together.dtype, together.shape) == (np.int64, (steps,))
    one_by_one = [NOISY.step_ns(batch, context + batch * j, 1)[0] for j in range(steps)]
    np.testing.assert_array_equal(together, one_by_one)


def test_the_factor_is_lognormal_with_a_mean_of_one() -> None:
    for factors in (
        NOISY.step_ns(3, 10_000, 20_000) / CLEAN.step_ns(3, 10_000, 20_000),
        np.array([NOISY.prefill_ns(n, 4096) / CLEAN.prefill_ns(n, 4096) for n in range(4000)]),
        np.array([NOISY.mixed_ns(n, 512, 4, 900) / CLEAN.mixed_ns(n, 512, 4, 900) for n in range(4000)]),
    ):
        tolerance = 4 * 0.2 / math.sqrt(len(factors))
        assert factors.mean() == pytest.approx(1, abs=tolerance)
        assert np.log(factors).std() == pytest.approx(0.2, rel=0.05)
        assert np.log(factors).mean() == pytest.approx(-0.02, abs=tolerance)
        assert abs(np.corrcoef(factors[:-1], factors[1:])[0, 1]) < 4 / math.sqrt(len(factors))


def test_every_argument_and_the_seed_change_it() -> None:
    def factors(noisy: Noisy) -> list[float]:
        return [
            noisy.prefill_ns(0, 512) / CLEAN.prefill_ns(0, 512),
            noisy.prefill_ns(512, 512) / CLEAN.prefill_ns(512, 512),
            noisy.prefill_ns(512, 1024) / CLEAN.prefill_ns(512, 1024),
            noisy.step_ns(512, 1024, 1)[0] / CLEAN.step_ns(512, 1024, 1)[0],
            noisy.step_ns(513, 1024, 1)[0] / CLEAN.step_ns(513, 1024, 1)[0],
            noisy.mixed_ns(512, 1024, 4, 900) / CLEAN.mixed_ns(512, 1024, 4, 900),
            noisy.mixed_ns(512, 1024, 4, 901) / CLEAN.mixed_ns(512, 1024, 4, 901),
            noisy.mixed_ns(512, 1024, 5, 901) / CLEAN.mixed_ns(512, 1024, 5, 901),
        ]

    found = factors(NOISY) + factors(Noisy(CLEAN, 0.2, 8)) + factors(Noisy(CLEAN, 0.2, -1))
    assert len({round(factor, 5) for factor in found}) >= len(found) - 1  # two of them share one of 4,096 strata
    assert factors(NOISY) == factors(Noisy(CLEAN, 0.2, 7))


def test_its_values_are_pinned() -> None:
    """They are part of what a seed means: another machine or version has to give the same."""
    assert NOISY.step_ns(4, 1000, 3).tolist() == [22378716, 24516068, 27767588]
    assert (NOISY.prefill_ns(0, 2048), NOISY.mixed_ns(0, 2048, 4, 1000)) == (226332821, 226262416)


def test_estimates_stay_clean() -> None:
    reused = np.array([0, 100, 8000])
    np.testing.assert_array_equal(NOISY.prefill_s(9000, reused), CLEAN.prefill_s(9000, reused))
    batch, context = np.array([0, 4]), np.array([0, 900])
    np.testing.assert_array_equal(NOISY.decode_s(batch, context), CLEAN.decode_s(batch, context))
    assert NOISY.name == CLEAN.name
    with pytest.raises(ConfigError, match="hardware=cpu"):
        NOISY.check("cpu", "llama3-70b")


def test_parts_alone_are_the_parts() -> None:
    assert NOISY.mixed_ns(512, 1024, 0, 0) == NOISY.prefill_ns(512, 1024)
    assert NOISY.mixed_ns(0, 0, 8, 9000) == NOISY.step_ns(8, 9000, 1)[0]
    assert NOISY.step_ns(0, 0, 2).tolist() == [0, 0]


def test_no_noise_is_the_model_itself() -> None:
    assert perturbed(CLEAN, 0.0, 3) is CLEAN
    assert perturbed(CLEAN, 0.2, 7) == NOISY
    for sigma in (-0.1, 1.5, math.nan):
        with pytest.raises(ConfigError, match="sigma"):
            perturbed(CLEAN, sigma, 0)
