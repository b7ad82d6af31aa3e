"""The bucket tuner against brute force."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcjax.backends.jax.buckets import chunks, doublings, ladder, padding, smallest, tune
from mcjax.errors import ConfigError


def computed(sizes: list[int], buckets: tuple[int, ...]) -> int:
    return sum(smallest(buckets, size) for size in sizes)


@given(st.lists(st.integers(1, 12), max_size=12), st.integers(1, 4), st.sampled_from([1, 2, 5]))
def test_no_choice_of_as_many_buckets_pads_less(sizes: list[int], count: int, multiple: int) -> None:
    largest = 12
    found = tune(sizes, largest, count, multiple)
    assert found == tuple(sorted(set(found)))
    assert len(found) <= count
    assert found[-1] == largest
    assert all(bucket % multiple == 0 for bucket in found[:-1])
    candidates = [bucket for bucket in range(1, largest) if bucket % multiple == 0]
    choices = [(*some, largest) for n in range(count) for some in combinations(candidates, n)]
    least = min(computed(sizes, choice) for choice in choices)
    assert computed(sizes, found) == least
    fewer = [choice for choice in choices if len(choice) < len(found)]
    assert all(computed(sizes, choice) > least for choice in fewer), "a bucket that saves nothing"


def test_a_long_sample_of_wide_chunks_is_no_trouble() -> None:
    sizes = [1 + (index * 7919) % 2048 for index in range(20_000)]
    found = tune(sizes, 2048, 4, multiple=8)
    assert len(found) == 4
    assert found[-1] == 2048
    assert padding(sizes, found) < 0.5 * padding(sizes, (2048,))


def test_chunks_of_prompts() -> None:
    assert chunks([5, 8, 17], 8) == [5, 8, 8, 8, 1]


def test_padding_is_the_share_of_what_is_computed() -> None:
    assert padding([1, 3, 4], (4,)) == pytest.approx(4 / 12)
    assert padding([1, 3, 4], (1, 4)) == pytest.approx(1 / 9)
    assert padding([], (4,)) == 0


def test_a_ladder_ends_with_the_largest_and_refuses_what_is_above() -> None:
    assert ladder("k", [64, 16], 128) == (16, 64, 128)
    assert ladder("k", [], 128) == (128,)
    wrongs: list[Any] = [[0], [129], [2.5], [True]]
    for wrong in wrongs:
        with pytest.raises(ConfigError, match=r"k=.*from 1 to 128"):
            ladder("k", wrong, 128)


def test_doublings() -> None:
    assert doublings(1) == (1,)
    assert doublings(8) == (1, 2, 4, 8)
    assert doublings(12) == (1, 2, 4, 8, 12)
