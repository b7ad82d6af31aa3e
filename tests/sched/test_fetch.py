"""Fetch strategies: what they weigh, case by case, and what all of them keep to."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcjax.errors import ConfigError
from mcjax.sched.base import Fetch, Missing, Recompute, Replica
from mcjax.sched.fetch.cheapest import Cheapest
from mcjax.sched.fetch.deadline import Deadline
from mcjax.sched.fetch.priority_aware import PriorityAware
from mcjax.types import Span, Tier

COMPUTE = Recompute.RECOMPUTE
STRATEGIES: list[Fetch] = [Cheapest(), PriorityAware(), Deadline()]


def near(seconds: float) -> Replica:
    return Replica("a", seconds)


def cold(seconds: float) -> Replica:
    return Replica("b", seconds, Tier.SSD)


def ask(fetch: Fetch, *replicas: Replica, recompute_s: float = 1.0, priority: int = 0, tokens: int = 0):
    missing = Missing(Span((1, 2)), replicas, recompute_s, priority, tokens)
    return fetch.source(missing, np.random.default_rng(0))


def test_a_near_memory_is_taken_even_where_computing_is_quicker() -> None:
    assert ask(PriorityAware(near_s=0.01), near(0.009), recompute_s=0.001) == near(0.009)
    assert ask(PriorityAware(near_s=0.01), near(0.011), recompute_s=0.001) is COMPUTE


def test_a_far_memory_is_taken_if_it_is_quicker_than_computing() -> None:
    assert ask(PriorityAware(), near(0.9)) == near(0.9)
    assert ask(PriorityAware(), near(1.1), tokens=10_000) is COMPUTE, "patience is for SSDs"


def test_an_ssd_may_take_longer_the_more_output_is_to_come() -> None:
    patient = PriorityAware(patience_s_per_token=0.01)
    assert ask(patient, cold(1.5), tokens=51) == cold(1.5)
    assert ask(patient, cold(1.5), tokens=49) is COMPUTE


def test_the_urgent_never_wait_for_an_ssd_longer_than_computing_takes() -> None:
    patient = PriorityAware(patience_s_per_token=0.01, urgent=2)
    assert ask(patient, cold(1.5), tokens=1000, priority=2) is COMPUTE
    assert ask(patient, cold(0.9), tokens=1000, priority=2) == cold(0.9)
    assert ask(patient, cold(1.5), tokens=1000, priority=1) == cold(1.5)


def test_of_what_is_worth_it_the_quickest_wins_and_host_memory_ties() -> None:
    assert ask(PriorityAware(), near(0.5), cold(0.4)) == cold(0.4)
    assert ask(PriorityAware(), near(0.4), cold(0.4)) == near(0.4)


def test_a_deadline_spares_the_instance() -> None:
    assert ask(Deadline(0.5), near(0.4), recompute_s=0.1) == near(0.4)
    assert ask(Deadline(0.5), near(0.6), recompute_s=0.1) is COMPUTE
    assert ask(Deadline(0.5), near(0.6), recompute_s=0.7) == near(0.6)


def test_a_deadline_is_shorter_for_the_urgent() -> None:
    assert ask(Deadline(0.5), near(0.4), recompute_s=0.1, priority=1) is COMPUTE
    assert ask(Deadline(0.5), near(0.2), recompute_s=0.1, priority=1) == near(0.2)
    assert ask(Deadline(0.5), near(0.9), recompute_s=0.1, priority=-1) == near(0.9)


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
def test_times_that_are_none_are_refused_by_name(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"sched\.fetch\.within_s"):
        Deadline(seconds)
    with pytest.raises(ConfigError, match=r"sched\.fetch\.near_s"):
        PriorityAware(near_s=seconds)
    with pytest.raises(ConfigError, match=r"sched\.fetch\.patience_s_per_token"):
        PriorityAware(patience_s_per_token=seconds)


times = st.floats(0, 10)
replicas = st.lists(st.builds(Replica, st.sampled_from("abc"), times, st.sampled_from([Tier.DRAM, Tier.SSD])))


@given(replicas, times, st.integers(-2_000, 2_000), st.integers(0, 10_000))
def test_what_beats_computing_is_always_fetched_and_nothing_slower_than_the_quickest(
    found: list[Replica], recompute_s: float, priority: int, tokens: int
) -> None:
    quickest_s = min((replica.transfer_s for replica in found), default=math.inf)
    for fetch in STRATEGIES:
        answer = ask(fetch, *found, recompute_s=recompute_s, priority=priority, tokens=tokens)
        if quickest_s < recompute_s:
            assert isinstance(answer, Replica)
            assert answer.transfer_s == quickest_s
