"""Estimates of a path begin as assumed, and follow what copies really take."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcjax.transfer.paths.estimate import Estimate


def test_before_the_first_outcome_it_is_what_was_assumed() -> None:
    estimate = Estimate(1e9, 1e-3)
    assert estimate.seconds(10**6) == pytest.approx(2e-3)
    assert estimate.line() == (1e9, 1e-3)


def test_it_finds_bandwidth_and_latency_from_sizes_that_differ() -> None:
    estimate, rng = Estimate(1e9, 1e-3), np.random.default_rng(0)
    for _ in range(200):
        nbytes = int(rng.integers(1, 64)) << 20
        estimate.learn(nbytes, (0.02 + nbytes / 5e9) * rng.normal(1, 0.02))
    bytes_per_s, latency_s = estimate.line()
    assert bytes_per_s == pytest.approx(5e9, rel=0.1)
    assert latency_s == pytest.approx(0.02, rel=0.1)


def test_a_path_that_has_become_slower_is_known_for_it_soon() -> None:
    estimate, rng = Estimate(10e9, 1e-4), np.random.default_rng(1)
    sizes = [int(size) << 20 for size in rng.integers(1, 64, 400)]
    for nbytes in sizes[:300]:
        estimate.learn(nbytes, 1e-4 + nbytes / 10e9)
    for nbytes in sizes[300:350]:
        estimate.learn(nbytes, 1e-4 + nbytes / 1e9)
    assert estimate.seconds(32 << 20) == pytest.approx(1e-4 + (32 << 20) / 1e9, rel=0.15)


def test_with_one_size_only_that_size_is_right_and_the_latency_stays() -> None:
    estimate = Estimate(1e9, 1e-3)
    for _ in range(300):
        estimate.learn(4096, 0.5e-3)
    assert estimate.seconds(4096) == pytest.approx(0.5e-3, rel=0.01)
    bytes_per_s, latency_s = estimate.line()
    assert bytes_per_s > 0
    assert 0 <= latency_s < 0.5e-3


@given(
    outcomes=st.lists(st.tuples(st.integers(0, 1 << 40), st.floats(0, 1e4)), max_size=60),
    prior=st.tuples(st.floats(1e3, 1e12), st.floats(0, 10)),
)
def test_whatever_it_is_told_its_line_makes_sense(
    outcomes: list[tuple[int, float]], prior: tuple[float, float]
) -> None:
    estimate = Estimate(*prior)
    for nbytes, seconds in outcomes:
        estimate.learn(nbytes, seconds)
        bytes_per_s, latency_s = estimate.line()
        assert bytes_per_s > 0
        assert 0 <= latency_s < math.inf
        assert 0 <= estimate.seconds(nbytes) < math.inf
