"""All eviction strategies: what the protocol asks of an order, each algorithm against its naive model, and inside the
real pool whatever is done in whatever order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from eviction_models import (
    NaiveCostAware,
    NaiveFIFO,
    NaiveLengthAware,
    NaiveLFU,
    NaiveLRU,
    NaiveS3FIFO,
    NaiveSieve,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.backends.virtual import VirtualLoop
from mcjax.cost.fitted import Fitted
from mcjax.errors import PoolFull
from mcjax.kvpool.eviction.cost_aware import GRAIN, CostAware
from mcjax.kvpool.eviction.fifo import FIFO
from mcjax.kvpool.eviction.length_aware import LengthAware
from mcjax.kvpool.eviction.lfu import LFU
from mcjax.kvpool.eviction.lru import LRU
from mcjax.kvpool.eviction.s3fifo import S3FIFO
from mcjax.kvpool.eviction.sieve import Sieve
from mcjax.kvpool.holds import Pin
from mcjax.kvpool.pool import Pool
from mcjax.kvpool.stores.slots import SlotStore
from mcjax.kvpool.watermark.static import Static
from mcjax.types import NullRecorder, Tier

COST = Fitted("doubles", 1_000_000, 250_000_000, 0, 0, 0)
"""A block of one token costs 1 + (2 n + 1) / 4 units at depth n: 5/4, 7/4, 9/4 ..."""


def cost_aware() -> CostAware:
    strategy = CostAware()
    strategy.use_cost(COST, 1)
    return strategy


def naive_cost_aware() -> NaiveCostAware:
    model = NaiveCostAware()
    model.prices = [GRAIN * (5 + 2 * depth) // 5 for depth in range(9)]
    return model


PAIRS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "lru": (LRU, NaiveLRU),
    "fifo": (FIFO, NaiveFIFO),
    "lfu": (LFU, NaiveLFU),
    "length_aware": (LengthAware, NaiveLengthAware),
    "sieve": (Sieve, NaiveSieve),
    "s3fifo": (S3FIFO, NaiveS3FIFO),
    "cost_aware": (cost_aware, naive_cost_aware),
}

# A forest: three prompts share their first two blocks, two of them four; two others stand alone.
PATHS: Sequence[tuple[int, ...]] = (
    (0, 1, 2, 3, 4, 5),
    (0, 1, 2, 3, 14),
    (0, 1, 22),
    (30, 31, 32, 33),
    (40,),
)

STEPS = st.lists(
    st.tuples(st.sampled_from(["use", "use", "use", "evict", "drop", "extend"]), st.integers(0, 99), st.integers(1, 6)),
    max_size=60,
)


class Driver:
    """Tells a strategy and its model what a pool would: prefixes come before what continues them, and leave after."""

    def __init__(self, strategy: Any, model: Any):
        self.both = (strategy, model)
        self.strategy = strategy
        self.model = model
        self.resident: dict[int, int | None] = {}

    def leading(self, path: Sequence[int]) -> int:
        return next((at for at, block in enumerate(path) if block not in self.resident), len(path))

    def use(self, path: Sequence[int], most: int) -> None:
        """A request finds what there is of `path`, and adds no more than `most` blocks to it, in one run."""
        found = self.leading(path)
        new = path[found : found + most]
        for one in self.both:
            if found:
                one.on_hit(path[:found])
            if new:
                one.on_insert(new, path[found - 1] if found else None)
        self.resident |= {block: path[at - 1] if at else None for at, block in enumerate(path) if block in new}

    def extend(self, path: Sequence[int]) -> None:
        if found := self.leading(path):
            for one in self.both:
                if hasattr(one, "on_extend"):
                    one.on_extend(path[:found])

    def evict(self, most: int) -> None:
        """As the pool does: again and again the first that nothing continues."""
        order = list(self.strategy.victims())
        assert order == self.model.victims()
        chosen: list[int] = []
        for _ in range(most):
            parents = [parent for block, parent in self.resident.items() if block not in chosen]
            chosen += [block for block in order if block not in chosen and block not in parents][:1]
        self.remove(chosen)

    def drop(self, block: int) -> None:
        """Found corrupt: with all that continues it, whatever its place in the order."""
        doomed = [block] if block in self.resident else []
        for other, parent in self.resident.items():
            doomed += [other] if parent in doomed else []
        self.remove(doomed[::-1])

    def remove(self, blocks: Sequence[int]) -> None:
        for one in self.both:
            one.on_remove(blocks)
        for block in blocks:
            del self.resident[block]

    def check(self) -> None:
        order = list(self.strategy.victims())
        assert sorted(order) == sorted(self.resident), "a permutation of what was inserted and not removed"
        assert order == list(self.strategy.victims()), "asking changes nothing"
        assert order == self.model.victims()


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=150, deadline=None)
@given(steps=STEPS, looks=st.integers(0, 3))
def test_order_is_that_of_the_naive_model(name: str, steps: list[tuple[str, int, int]], looks: int) -> None:
    make, make_model = PAIRS[name]
    driver = Driver(make(), make_model())
    for number, (what, pick, most) in enumerate(steps):
        path = PATHS[pick % len(PATHS)]
        if what == "use":
            driver.use(path, most)
        elif what == "extend":
            driver.extend(path)
        elif what == "evict":
            driver.evict(most)
        else:
            driver.drop(path[pick % len(path)])
        if looks and number % looks == 0:  # without a look, a removal is none of an eviction
            driver.check()
    driver.check()


@pytest.mark.parametrize("name", PAIRS)
def test_an_order_read_in_part_is_as_if_it_had_not_been_read(name: str) -> None:
    strategy = PAIRS[name][0]()
    for path in PATHS:
        new = [block for block in path if block not in list(strategy.victims())]
        strategy.on_insert(new, path[len(path) - len(new) - 1] if len(new) < len(path) else None)
    strategy.on_hit(PATHS[0])
    strategy.on_hit(PATHS[0][:2])
    before = list(strategy.victims())
    assert [next(strategy.victims()) for _ in range(3)] == before[:1] * 3
    assert list(strategy.victims()) == before


@pytest.mark.parametrize("name", PAIRS)
def test_a_copy_goes_its_own_way(name: str) -> None:
    """Every node gets a deep copy of what the config names."""
    first = PAIRS[name][0]()
    second = copy.deepcopy(first)
    first.on_insert((1, 2), None)
    assert list(second.victims()) == []
    assert sorted(first.victims()) == [1, 2]


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["serve", "serve", "hold", "release", "drop"]), st.integers(0, 99)), max_size=50
    ),
    capacity=st.integers(6, 12),
    low=st.sampled_from([0.4, 1.0]),
)
def test_inside_the_pool(name: str, steps: list[tuple[str, int]], capacity: int, low: float) -> None:
    """Everything adds up after every step, and a reservation fails only when what is pinned leaves no room."""

    async def play() -> None:
        store = SlotStore("n", Tier.DRAM, capacity, 1)
        pool = Pool("n", store, PAIRS[name][0](), Static(low, 1.0), NullRecorder(), 1000)
        held: list[Pin] = []
        for what, pick in steps:
            path = PATHS[pick % len(PATHS)]
            if what == "release" and held:
                pool.release(held.pop(pick % len(held)))
            elif what == "drop" and not any(path[pick % len(path)] in one.blocks for one in held):
                pool.drop([path[pick % len(path)]])
            elif what in ("serve", "hold"):
                pin = pool.pin(0, path)
                missing = len(path) - len(pin)
                pinned = {block for one in [*held, pin] for block in one.blocks}
                try:
                    room = pool.reserve(0, missing)
                except PoolFull:
                    assert capacity - len(pinned) < missing
                else:
                    if missing:
                        pool.commit(room, path[len(pin) :], path[len(pin) - 1] if len(pin) else None)
                    pool.release(room)
                    pool.deepen(pin, path)
                    assert pool.match(path) == len(path)
                held.append(pin)
                if what == "serve":
                    pool.release(held.pop())
            pool.check_integrity()
        for pin in held:
            pool.release(pin)
        pool.check_idle()

    VirtualLoop().run(play)


def test_cost_aware_puts_first_what_has_lost_its_prefix() -> None:
    strategy = CostAware()
    strategy.on_insert((1, 2, 3), None)
    strategy.on_insert((9,), None)
    for _ in range(5):
        strategy.on_hit((1, 2, 3))
    assert list(strategy.victims()) == [9, 3, 2, 1]
    strategy.on_remove((1,))
    assert list(strategy.victims()) == [3, 2, 9]


def test_cost_aware_keeps_the_deeper_of_two_blocks_used_as_often() -> None:
    strategy = cost_aware()
    strategy.on_insert((1, 2), None)
    strategy.on_insert((7,), None)
    assert next(strategy.victims()) == 7


def test_what_a_request_writes_itself_is_no_hit() -> None:
    """A prompt committed piece by piece deepens its pin each time: no block of it is used more often for that."""

    async def play() -> list[int]:
        eviction = LFU()
        pool = Pool("n", SlotStore("n", Tier.DRAM, 8, 1), eviction, Static(), NullRecorder(), 1000)
        for path, pieces in (((1, 2, 3), 3), ((7, 8), 1)):
            pin = pool.pin(0, path)
            room = pool.reserve(0, len(path))
            step = len(path) // pieces
            for at in range(0, len(path), step):
                pool.commit(room, path[at : at + step], path[at - 1] if at else None)
                pool.deepen(pin, path)
            pool.release(room)
            pool.release(pin)
        return list(eviction.victims())

    assert VirtualLoop().run(play) == [3, 2, 1, 8, 7]
