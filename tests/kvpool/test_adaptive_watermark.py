"""The adaptive watermark alone, and in a closed loop with a real pool over a link in virtual time."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tier_toy import Arrival, Outcome, play

from mcjax.errors import ConfigError
from mcjax.kvpool.base import TierReading, Watermark
from mcjax.kvpool.watermark.adaptive import Adaptive
from mcjax.kvpool.watermark.static import Static
from mcjax.types import NS_PER_S

MS = NS_PER_S // 1000
CAPACITY = 500
SAVE_NS = 8 * MS


def told(adaptive: Adaptive, reading: TierReading, counts: list[int], gap_ns: int) -> list[float]:
    """The levels after reservations of so many blocks, at equal times."""
    levels: list[float] = []
    for count in counts:
        reading.now_ns += gap_ns
        reading.asked += count
        levels.append(adaptive.levels(reading)[1])
    return levels


def reading(hits: float = 0.0) -> TierReading:
    """Of a tier in which a save has been made."""
    return TierReading(CAPACITY, saves=True, saved=1, busy_ns=SAVE_NS, hits=[hits] * 100)


def test_a_tier_with_nothing_below_may_be_full() -> None:
    assert set(told(Adaptive(), TierReading(CAPACITY), [30] * 50, MS)) == {1.0}


def test_the_first_saves_are_made_early() -> None:
    """Until one has been made, nobody knows how long they take; then what was asked for before counts."""
    adaptive, now = Adaptive(), reading()
    now.saved = now.busy_ns = 0
    assert set(told(adaptive, now, [30] * 10, SAVE_NS * 50)) == {0.75}
    now.saved, now.busy_ns = 1, SAVE_NS
    assert told(adaptive, now, [10], SAVE_NS * 50) == [1 - 1.5 * 30 / CAPACITY]


def test_what_is_kept_to_spare_is_what_saves_are_behind() -> None:
    """Saves that keep up leave a backlog of one reservation; those that do not, of many, and no more than `most`."""
    assert told(Adaptive(), reading(), [20] * 300, SAVE_NS * 21)[-1] == pytest.approx(1 - 1.5 * 20 / CAPACITY)
    assert told(Adaptive(), reading(), [20] * 300, SAVE_NS * 19)[-1] < 1 - 100 / CAPACITY
    assert told(Adaptive(), reading(), [20] * 300, SAVE_NS)[-1] == 0.5
    assert told(Adaptive(most=0.2), reading(), [20] * 300, SAVE_NS)[-1] == 0.8


def test_slower_saves_and_a_higher_rate_ask_for_more() -> None:
    sizes = [int(size) for size in np.random.default_rng(5).integers(5, 60, 400)]
    slow, fast = reading(), reading()
    slow.busy_ns = 2 * SAVE_NS
    usual = told(Adaptive(), reading(), sizes, SAVE_NS * 60)[-1]
    assert told(Adaptive(), slow, sizes, SAVE_NS * 60)[-1] < usual
    assert told(Adaptive(), fast, sizes, SAVE_NS * 30)[-1] < usual


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_the_more_hits_are_worth_the_less_is_kept_to_spare(seed: int) -> None:
    sizes = [int(size) for size in np.random.default_rng(seed).integers(5, 60, 300)]
    levels = [told(Adaptive(), reading(hits), sizes, SAVE_NS * 40)[-1] for hits in (0.0, 0.5, 0.8, 0.95)]
    assert levels == sorted(levels)
    assert levels[0] < levels[-1]


def test_a_question_asked_again_changes_nothing() -> None:
    adaptive, now = Adaptive(), reading()
    levels = told(adaptive, now, [20] * 50, SAVE_NS * 10)
    assert [adaptive.levels(now) for _ in range(3)] == [(levels[-1], levels[-1])] * 3


def test_each_pool_has_a_copy_of_its_own() -> None:
    first = Adaptive()
    second = copy.deepcopy(first)
    told(first, reading(), [20] * 50, SAVE_NS)
    assert told(second, reading(), [1], NS_PER_S) == [1 - 1.5 / CAPACITY]


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"window": 0}, "window"),
        ({"margin": 0.9}, "margin"),
        ({"worth": -1.0}, "worth"),
        ({"most": 0.0}, "most"),
        ({"most": 1.0}, "most"),
    ],
)
def test_what_cannot_work_is_named(arguments: dict[str, float], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"kvpool\.watermark\.{key}"):
        Adaptive(**arguments)  # pyright: ignore[reportArgumentType]


# In a closed loop


def fresh(blocks: Iterator[int], count: int) -> tuple[int, ...]:
    return tuple(next(blocks) for _ in range(count))


def numbers(first: int) -> Iterator[int]:
    while True:
        yield first
        first += 1


def levels_after(outcome: Outcome, warm_s: float) -> list[float]:
    return [level for time_ns, level in outcome.levels if time_ns > warm_s * NS_PER_S]


def test_equal_requests_at_equal_times_have_one_level() -> None:
    new = numbers(0)
    arrivals = [Arrival(number * 250 * MS, fresh(new, 20)) for number in range(400)]
    found = levels_after(play(arrivals, Adaptive(), CAPACITY, SAVE_NS), 25)
    assert max(found) - min(found) < 0.002
    assert found[-1] == pytest.approx(1 - 1.5 * 20 / CAPACITY, abs=0.002)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None, phases=(Phase.explicit, Phase.generate))
def test_random_requests_at_a_constant_rate_keep_the_level_in_a_small_band(seed: int) -> None:
    rng, new = np.random.default_rng(seed), numbers(0)
    times = np.cumsum(rng.exponential(0.5, 700))
    arrivals = [Arrival(int(at * NS_PER_S), fresh(new, int(rng.integers(10, 30)))) for at in times]
    outcome = play(arrivals, Adaptive(), CAPACITY, SAVE_NS)
    found = levels_after(outcome, 130)
    assert min(found) >= 0.5
    assert max(found) - min(found) < 0.25  # of 120 seeds 0.06 in the median, 0.17 at most: bursts are load
    turns = np.diff(np.sign([step for step in np.diff(found) if abs(step) > 0.01]))
    assert np.count_nonzero(turns) < len(found) / 20, "it goes to and fro"


def changing(seed: int, phase_s: float = 200.0) -> list[Arrival]:
    """Sessions that come back and just fit; then prompts that nobody has seen; then both."""
    rng, new, arrivals = np.random.default_rng(seed), numbers(10**6), list[Arrival]()
    for phase, begin_s in (("sessions", 0.0), ("prompts", phase_s), ("both", 2 * phase_s)):
        at_s = begin_s
        while phase != "prompts" and (at_s := at_s + rng.exponential(0.5)) < begin_s + phase_s:
            session = int(rng.integers(24)) * 1000
            arrivals.append(Arrival(int(at_s * NS_PER_S), tuple(range(session, session + 20))))
        at_s = begin_s
        while phase != "sessions" and (at_s := at_s + rng.exponential(1.0)) < begin_s + phase_s:
            arrivals.append(Arrival(int(at_s * NS_PER_S), fresh(new, int(rng.integers(10, 50)))))
    return sorted(arrivals, key=lambda arrival: arrival.at_ns)


@pytest.mark.check_long
@pytest.mark.timeout(900)
def test_no_static_watermark_does_as_well_where_the_load_changes_its_character() -> None:
    """Over several loads of one kind, no fixed level waits as little; on each, none is far ahead."""
    loads = [changing(seed) for seed in range(6)]

    def means_s(watermark: Watermark) -> list[float]:
        own = [copy.deepcopy(watermark) for _ in loads]
        return [
            play(load, mark, CAPACITY, SAVE_NS, compute_ns=20 * MS).mean_s
            for load, mark in zip(loads, own, strict=True)
        ]

    adaptive = means_s(Adaptive())
    static = {high: means_s(Static(high, high)) for high in (0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)}
    assert sum(adaptive) < 0.99 * min(sum(means) for means in static.values()), static
    for seed, mean_s in enumerate(adaptive):
        assert mean_s < 1.03 * min(means[seed] for means in static.values())
