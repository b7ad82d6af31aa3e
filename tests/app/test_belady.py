"""The offline bound against every way there is of evicting, on cases small enough to try them all."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.app.hit_rates.belady import Belady
from mcjax.app.hit_rates.replay import Chains, replay
from mcjax.kvpool.eviction.cost_aware import CostAware
from mcjax.kvpool.eviction.fifo import FIFO
from mcjax.kvpool.eviction.length_aware import LengthAware
from mcjax.kvpool.eviction.lfu import LFU
from mcjax.kvpool.eviction.lru import LRU
from mcjax.kvpool.eviction.s3fifo import S3FIFO
from mcjax.kvpool.eviction.sieve import Sieve
from mcjax.kvpool.watermark.static import Static

PATHS = ((0, 1, 2), (0, 1, 12), (0, 21), (30, 31), (40,), (50, 51, 52))
ONLINE: tuple[Callable[[], Any], ...] = (LRU, LFU, FIFO, S3FIFO, Sieve, LengthAware, CostAware)

prompts = st.lists(st.sampled_from(PATHS), min_size=1, max_size=9).map(tuple)
capacities = st.integers(3, 6)


def most_found(requests: tuple[tuple[int, ...], ...], capacity: int) -> int:
    """The most blocks that any choice of leaving blocks can find: every closed subset is tried after every request."""
    parents = {block: path[at - 1] if at else None for path in PATHS for at, block in enumerate(path)}

    @functools.cache
    def best(request: int, resident: frozenset[int]) -> int:
        if request == len(requests):
            return 0
        path = requests[request]
        found = next((at for at, block in enumerate(path) if block not in resident), len(path))
        others = sorted(resident - set(path))
        room = capacity - len(path)
        most = 0
        for count in range(min(room, len(others)) + 1):
            for kept in itertools.combinations(others, count):
                after = frozenset({*kept, *path})
                if all(parents[block] is None or parents[block] in after for block in after):
                    most = max(most, best(request + 1, after))
        return found + most

    return best(0, frozenset())


def found_by(eviction: Any, requests: tuple[tuple[int, ...], ...], capacity: int) -> int:
    chains = Chains(1, requests, [len(path) for path in requests])
    return sum(replay(chains, capacity, eviction, Static()))


@settings(max_examples=150, deadline=None)
@given(prompts, capacities)
def test_belady_is_optimal(requests: tuple[tuple[int, ...], ...], capacity: int) -> None:
    assert found_by(Belady(requests), requests, capacity) == most_found(requests, capacity)


@pytest.mark.parametrize("make", ONLINE)
@settings(max_examples=50, deadline=None)
@given(requests=prompts, capacity=capacities)
def test_no_policy_beats_it(make: Any, requests: tuple[tuple[int, ...], ...], capacity: int) -> None:
    assert found_by(make(), requests, capacity) <= found_by(Belady(requests), requests, capacity)


def test_it_is_not_lru() -> None:
    """What comes back stays, though two prompts that do not were used since."""
    requests = ((40,), (30, 31), (0, 21), (40,))
    assert found_by(LRU(), requests, 3) == 0
    assert found_by(Belady(requests), requests, 3) == 1
