"""The prefill selections against cases worked out by hand, and Mooncake's Algorithm 1 line by line."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sched_fixtures import columns, request, view

from mcjax.errors import ConfigError
from mcjax.sched.base import PrefillChoice, PrefillSelection
from mcjax.sched.prefill.cache_aware import CacheAware
from mcjax.sched.prefill.kvcache_centric import KVCacheCentric
from mcjax.sched.prefill.least_loaded import LeastLoaded
from mcjax.sched.prefill.random import Random
from mcjax.sched.prefill.round_robin import RoundRobin
from mcjax.sched.view import ClusterView, SSDColumns

SELECTIONS: list[type[PrefillSelection]] = [KVCacheCentric, CacheAware, LeastLoaded, Random, RoundRobin]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def choose(selection: PrefillSelection, seen: ClusterView, seed: int = 0) -> PrefillChoice:
    return selection.choose(request(seen.prompt_tokens), seen, rng(seed))


def test_nothing_cached_anywhere_has_ratio_one_and_pulls_nothing() -> None:
    """Both 0: the ratio counts as 1, so every instance computes; all tie and the lowest index wins."""
    assert choose(KVCacheCentric(), view([0, 0, 0])) == PrefillChoice(0, None, 0)


def test_an_instance_without_the_prefix_has_an_infinite_ratio_and_pulls() -> None:
    """p0 holds 500 but is busy for 1 s. p1 holds nothing: pull 500 (0.5 ms) and compute 500 (0.5 s) beats 1.5 s."""
    assert choose(KVCacheCentric(), view([500, 0], queue_s=[1.0, 0.0])) == PrefillChoice(1, 0, 500)


def test_below_the_threshold_the_instance_computes_what_it_lacks() -> None:
    """best / local = 500 / 125 = 4, not more than 4: p1 reuses its own 125 tokens only."""
    seen = view([500, 125], queue_s=[10.0, 0.0])
    assert choose(KVCacheCentric(balancing_threshold=4.0), seen) == PrefillChoice(1, None, 125)


def test_above_the_threshold_it_pulls() -> None:
    """best / local = 500 / 124 > 4."""
    seen = view([500, 124], queue_s=[10.0, 0.0])
    assert choose(KVCacheCentric(balancing_threshold=4.0), seen) == PrefillChoice(1, 0, 500)


def test_the_transfer_counts_in_the_choice() -> None:
    """p1 would pull 500 bytes at 100 bytes/s (5 s); p0's queue of 4 s is shorter."""
    assert choose(KVCacheCentric(), view([500, 0], queue_s=[4.0, 0.0], bytes_per_s=100.0)).instance == 0
    assert choose(KVCacheCentric(), view([500, 0], queue_s=[6.0, 0.0], bytes_per_s=100.0)).instance == 1


def test_a_congested_holder_makes_the_transfer_dearer() -> None:
    """The same pull behind 400 bytes that already wait to leave the holder: 9 s against a queue of 6 s."""
    seen = view([500, 0], queue_s=[6.0, 0.0], bytes_per_s=100.0, outgoing_bytes=[400, 0])
    assert choose(KVCacheCentric(), seen).instance == 0


def test_ties_go_to_the_lowest_index() -> None:
    assert choose(KVCacheCentric(), view([0, 300, 300], queue_s=[9.0, 1.0, 1.0])).instance == 1
    assert choose(CacheAware(), view([0, 300, 300], queue_s=[9.0, 1.0, 1.0])).instance == 1


@pytest.mark.parametrize("selection", [KVCacheCentric(), KVCacheCentric(1.0), CacheAware()])
@pytest.mark.parametrize("holder", range(4))
def test_a_second_turn_goes_to_the_holder_when_loads_tie(selection: PrefillSelection, holder: int) -> None:
    """Multi-turn requests must not wander while nobody is busier than the holder."""
    local = [0, 0, 0, 0]
    local[holder] = 900
    chosen = choose(selection, view(local, queue_s=[2.0] * 4))
    assert chosen == PrefillChoice(holder, None, 900)


@pytest.mark.parametrize("selection", [KVCacheCentric(), CacheAware(), LeastLoaded()])
def test_the_first_token_is_expected_behind_the_queue(selection: PrefillSelection) -> None:
    """A router blind to queues would send everything to the holder; the wait is part of the estimate."""
    assert choose(selection, view([900, 0], queue_s=[160.0, 0.0])).instance == 1


def test_hot_prefixes_spread_with_the_load_and_nothing_else() -> None:
    """Replication is a side effect: who pulled holds the prefix afterwards, and the next request may stay there."""
    selection, local, queue_s = KVCacheCentric(), [800, 0, 0, 0], [0.0] * 4
    for _ in range(40):
        chosen = choose(selection, view(local, queue_s=queue_s))
        if chosen.source is not None:
            assert local[chosen.source] == max(local), "the source is whoever holds the longest prefix"
            local[chosen.instance] = chosen.reused_tokens
        queue_s[chosen.instance] += 0.2
    assert local == [800] * 4, "under load every instance ends up with a replica"


def test_a_threshold_below_one_is_refused() -> None:
    """The best prefix is never shorter than the local one; NaN is no threshold either."""
    for threshold in (0.5, math.nan):
        with pytest.raises(ConfigError, match="balancing_threshold"):
            KVCacheCentric(threshold)


def test_cache_aware_never_pulls() -> None:
    """p1 would gain from pulling; it may not. 0.5 s of queue at p0 is less than computing 900 more tokens."""
    assert choose(CacheAware(), view([900, 0], queue_s=[0.5, 0.0])) == PrefillChoice(0, None, 900)
    assert choose(CacheAware(), view([900, 0], queue_s=[2.0, 0.0])) == PrefillChoice(1, None, 0)


def test_least_loaded_is_blind_to_the_cache_and_draws_ties() -> None:
    assert choose(LeastLoaded(), view([900, 0, 0], queue_s=[0.1, 0.2, 0.0])).instance == 2
    drawn = [choose(LeastLoaded(), view([900, 0, 0], queue_s=[1.0, 0.0, 0.0]), seed).instance for seed in range(200)]
    assert sorted(dict.fromkeys(drawn)) == [1, 2]
    assert 60 < drawn.count(1) < 140


def test_random_draws_every_instance_evenly() -> None:
    generator = rng()
    drawn = [Random().choose(request(), view([0, 0, 0, 0]), generator).instance for _ in range(800)]
    assert all(140 < drawn.count(instance) < 260 for instance in range(4))


def test_round_robin_goes_in_turn_and_survives_a_change_of_size() -> None:
    selection = RoundRobin()
    assert [choose(selection, view([0, 0, 0])).instance for _ in range(5)] == [0, 1, 2, 0, 1]
    assert choose(selection, view([0, 0])).instance in (0, 1)


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("local", [[0], [700], [300, 0, 500]])
def test_what_an_instance_happens_to_hold_is_reused(selection: type[PrefillSelection], local: list[int]) -> None:
    chosen = choose(selection(), view(local))
    assert chosen.reused_tokens == local[chosen.instance]
    assert chosen.source is None


def test_of_equal_holders_the_one_with_the_least_to_send_is_pulled_from() -> None:
    """Everybody pulls from somebody: not always from the first, or its link would carry all."""
    held, queue_s = [800, 800, 0, 800], [9.0, 9.0, 0.0, 9.0]
    chosen = choose(KVCacheCentric(), view(held, queue_s, outgoing_bytes=[500, 400, 0, 400]))
    assert chosen == PrefillChoice(2, 1, 800)
    assert choose(KVCacheCentric(), view(held, queue_s, outgoing_bytes=[0, 0, 0, 9])).source == 0
    longest = view([900, 800, 0, 800], queue_s, outgoing_bytes=[500, 0, 0, 0])
    assert choose(KVCacheCentric(), longest).source == 0, "the longest prefix comes first"


# SSDs: a loaded token takes 0.1 ms, a computed one 1 ms, a pulled one 1 us


def test_what_the_own_ssd_holds_counts_where_loading_beats_computing() -> None:
    """p1 would load 800 tokens in 0.08 s; behind 8,000 bytes in 0.88 s, which computing 800 tokens beats."""
    for selection in (CacheAware(), KVCacheCentric()):
        seen = view([100, 100], ssd_tokens=[0, 800])
        assert choose(selection, seen) == PrefillChoice(1, None, 900)
        seen = view([100, 100], ssd_tokens=[0, 800], ssd_queued=[0, 8_000])
        assert choose(selection, seen) == PrefillChoice(0, None, 100)


def test_the_load_counts_in_the_choice() -> None:
    """p0: 0.08 s to load and 0.1 s to compute; p1: 1 s to compute, and nobody before."""
    assert choose(CacheAware(), view([0, 0], [0.81, 0.0], ssd_tokens=[900, 0])).instance == 0
    assert choose(CacheAware(), view([0, 0], [0.82, 0.0], ssd_tokens=[900, 0])).instance == 1


def test_an_own_ssd_is_local_to_algorithm_1() -> None:
    """p1 holds a third of p0's prefix on its SSD: within the threshold it loads that, beyond it pulls."""
    seen = view([900, 0], [9.0, 0.0], ssd_tokens=[0, 300])
    assert choose(KVCacheCentric(3.0), seen) == PrefillChoice(1, None, 300)
    assert choose(KVCacheCentric(2.9), seen) == PrefillChoice(1, 0, 900)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_even_the_blind_reuse_what_their_choice_can_load(selection: type[PrefillSelection]) -> None:
    assert choose(selection(), view([100], ssd_tokens=[700])).reused_tokens == 800


def test_the_view_says_what_loading_takes() -> None:
    seen = view([100, 0, 0], ssd_tokens=[200, 300, 0], ssd_queued=[0, 1000, 5])
    assert seen.load_s(seen.ssd_tokens).tolist() == pytest.approx([0.02, 0.13, 0.0])
    none = view([100, 0, 0])
    assert none.ssd_tokens.tolist() == [0, 0, 0]
    assert none.load_s(np.array([0, 1, 0])).tolist() == [0.0, math.inf, 0.0]


@st.composite
def views(draw: st.DrawFn) -> ClusterView:
    count = draw(st.integers(1, 6))
    blocks = st.lists(st.integers(0, 10), min_size=count, max_size=count)
    queues = st.lists(st.sampled_from([0.0, 0.1, 0.25, 3.0]), min_size=count, max_size=count)
    return view(
        [100 * blocks for blocks in draw(blocks)],
        draw(queues),
        prompt_tokens=draw(st.integers(1000, 3000)),
        bytes_per_s=draw(st.sampled_from([1e3, 1e6])),
        latency_s=draw(st.sampled_from([0.0, 0.01])),
    )


@pytest.mark.parametrize("selection", SELECTIONS)
@settings(max_examples=40)
@given(seen=views(), seed=st.integers(0, 9))
def test_a_selection_is_a_function_of_what_it_is_given(
    selection: type[PrefillSelection], seen: ClusterView, seed: int
) -> None:
    """Same inputs, same answer, in range; the view is as it was."""
    before = columns(seen)
    first, again = choose(selection(), seen, seed), choose(selection(), seen, seed)
    assert first == again
    assert columns(seen) == before
    assert 0 <= first.instance < len(seen.names)


def by_the_paper(seen: ClusterView, threshold: float) -> PrefillChoice:
    """Algorithm 1 (FAST'25), instance by instance as it is printed."""
    local = seen.prefix_tokens.tolist()
    best = max(local)
    holder = local.index(best)
    costs: list[tuple[float, int, PrefillChoice]] = []
    for index, mine in enumerate(local):
        ratio = best / mine if mine else (1.0 if best == 0 else math.inf)
        pulled = ratio > threshold
        reused = best if pulled else mine
        transfer_s = 0.0
        if pulled:
            nbytes = (best - mine) * seen.bytes_per_token + int(seen.outgoing_bytes[holder])
            transfer_s = seen.network_latency_s + nbytes / seen.network_bytes_per_s
        prefill_s = float(seen.prefill_s(np.array([reused]))[0])
        choice = PrefillChoice(index, holder if pulled else None, reused)
        costs.append((transfer_s + float(seen.queue_s[index]) + prefill_s, index, choice))
    return min(costs)[2]


@pytest.mark.parametrize("selection", SELECTIONS)
@settings(max_examples=40)
@given(seen=views(), seed=st.integers(0, 9))
def test_ssds_that_have_nothing_of_a_prompt_change_nothing(
    selection: type[PrefillSelection], seen: ClusterView, seed: int
) -> None:
    nothing = np.zeros_like(seen.prefix_tokens)
    beside = replace(seen, ssd=SSDColumns(nothing, nothing + 7, 1e3, 0.1))
    assert choose(selection(), beside, seed) == choose(selection(), seen, seed)


@settings(max_examples=150)
@given(seen=views(), threshold=st.sampled_from([1.0, 2.0, 4.0, 10.0]))
def test_the_vectorised_choice_is_the_papers(seen: ClusterView, threshold: float) -> None:
    chosen, expected = choose(KVCacheCentric(threshold), seen), by_the_paper(seen, threshold)
    if chosen.instance != expected.instance:  # sums in another order may tie differently in the last bit

        def cost(choice: PrefillChoice) -> float:
            moved = np.full(len(seen.names), choice.reused_tokens - int(seen.prefix_tokens[choice.instance]))
            pulled_s = 0.0 if choice.source is None else float(seen.transfer_s(choice.source, moved)[choice.instance])
            compute_s = float(seen.prefill_s(np.full(len(seen.names), choice.reused_tokens))[choice.instance])
            return float(seen.queue_s[choice.instance]) + pulled_s + compute_s

        assert cost(chosen) == pytest.approx(cost(expected), rel=1e-12)
    else:
        assert chosen == expected


def test_a_thousand_instances_are_one_call() -> None:
    """Columns, not loops: a view of a thousand instances costs a handful of array operations."""
    generator = rng(3)
    local = (generator.integers(0, 10, 1000) * 100).tolist()
    seen = view(local, generator.uniform(0, 5, 1000).tolist())
    chosen = [choose(KVCacheCentric(), seen).instance for _ in range(200)]
    assert chosen == [by_the_paper(seen, 4.0).instance] * 200
