"""A small set of combinations in which every pair of values occurs that may go together.

Faults of a compiler or a kernel mostly need one value or two to show, so pairs find nearly what the whole product finds
(Kuhn, Wallace and Gallo 2004, "Software fault interactions and implications for software testing"). Built greedily: one
combination after another, each value the one that adds most pairs (after Cohen et al. 1997, "The AETG system").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations
from typing import Any, TypeAlias

Combination: TypeAlias = dict[str, Any]
Pair: TypeAlias = frozenset[tuple[str, Hashable]]


def pairwise(
    axes: Mapping[str, Sequence[Hashable]], together: Callable[[Mapping[str, Any]], bool] = lambda _: True
) -> list[Combination]:
    """Combinations of a value of each axis, in which every pair occurs that occurs in any combination at all.

    `together` is asked of partial combinations too; it must not refuse a part of what it allows as a whole. The same
    arguments give the same combinations in the same order.
    """
    missing: dict[Pair, Combination] = {}
    for one, other in combinations(axes, 2):
        for value in axes[one]:
            for match in axes[other]:
                pair = {one: value, other: match}
                missing[frozenset(pair.items())] = pair
    found: list[Combination] = []
    uses: Counter[tuple[str, Hashable]] = Counter()
    while missing:
        key, pair = next(iter(missing.items()))
        combination = _filled(pair, axes, together, missing, uses) if together(pair) else None
        if combination is None:  # in no combination at all
            del missing[key]
            continue
        for used in pairs_of(combination):
            missing.pop(used, None)
        uses.update(combination.items())
        found.append(combination)
    return found


def pairs_of(combination: Mapping[str, Any]) -> list[Pair]:
    """Its values, two at a time."""
    return [frozenset(pair) for pair in combinations(combination.items(), 2)]


def _filled(
    part: Combination,
    axes: Mapping[str, Sequence[Hashable]],
    together: Callable[[Mapping[str, Any]], bool],
    missing: Mapping[Pair, Combination],
    uses: Mapping[tuple[str, Hashable], int],
) -> Combination | None:
    """`part` with a value for every other axis, most missing pairs first, then the least used so far; None if no such
    values go together."""
    axis = next((name for name in axes if name not in part), None)
    if axis is None:
        return {name: part[name] for name in axes}

    def rank(value: Hashable) -> tuple[int, int]:
        pairs = sum(frozenset(((axis, value), taken)) in missing for taken in part.items())
        return -pairs, uses[axis, value]

    for value in sorted(axes[axis], key=rank):  # stable: what is left of ties goes to the value named first
        tried = {**part, axis: value}
        if together(tried) and (found := _filled(tried, axes, together, missing, uses)):
            return found
    return None
