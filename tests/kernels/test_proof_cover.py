"""The pairwise cover: complete, allowed, small, and the same every time."""

from __future__ import annotations

from itertools import combinations, product
from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.kernels.proof.cover import pairs_of, pairwise


@st.composite
def constrained(draw: st.DrawFn):
    """Axes, and pairs of values of different axes that may not go together."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    axes = {f"axis{index}": tuple(range(size)) for index, size in enumerate(sizes)}
    values = [(name, value) for name, those in axes.items() for value in those]
    pairs = [frozenset(pair) for pair in combinations(values, 2) if pair[0][0] != pair[1][0]]
    return axes, draw(st.sets(st.sampled_from(pairs), max_size=8)) if pairs else set()


@settings(max_examples=150, deadline=None)
@given(constrained())
def test_every_pair_that_may_go_together_occurs_and_no_other(case) -> None:
    axes, forbidden = case

    def together(part) -> bool:
        return forbidden.isdisjoint(pairs_of(part))

    whole = [dict(zip(axes, values)) for values in product(*axes.values())]
    possible = {pair for combination in whole if together(combination) for pair in pairs_of(combination)}
    found = pairwise(axes, together)
    assert all(list(combination) == list(axes) and together(combination) for combination in found)
    assert {pair for combination in found for pair in pairs_of(combination)} == possible
    assert found == pairwise(axes, together)


def test_the_cover_is_far_smaller_than_the_product() -> None:
    axes = {f"axis{index}": range(4) for index in range(6)}
    assert 16 <= len(pairwise(axes)) <= 32 < prod(len(values) for values in axes.values())
