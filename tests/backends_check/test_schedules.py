"""Every request ends once, every token is right, and nothing is left held, whatever is lost on the way."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from checking import ALL_FAULTS, NO_FAULTS, run

from mcjax.backends.check.digests import entry, next_token, reference
from mcjax.backends.check.faults import TIMED, Faults

CASES = [("no faults", NO_FAULTS), ("all faults", ALL_FAULTS)]


@pytest.mark.parametrize(("name", "faults"), CASES)
def test_a_hundred_schedules_hold(name: str, faults: Faults) -> None:
    check(range(100), faults)


@pytest.mark.check_long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "faults"), CASES)
def test_a_thousand_schedules_hold(name: str, faults: Faults) -> None:
    check(range(1000), faults)


def check(seeds: range, faults: Faults) -> None:
    injected: Counter[str] = Counter()
    completed = 0
    for seed in seeds:
        outcome = run(seed, faults)
        assert not outcome.problems, f"seed {seed} ({outcome.cluster}): {outcome.problems[0]}"
        injected.update(outcome.faults)
        completed += outcome.states.get("completed", 0)
    assert completed > 5 * len(seeds)
    if faults is ALL_FAULTS:  # a fault that was never injected proves nothing
        assert set(injected) == {
            "lost", "late", "duplicated", "corrupted", "slow", "cancelled", "missed", "broken", "raised",
            "death", "stale_view", "lost_pages", "ssd_failed", "rotten", "ssd_outage", "nic_outage"
        }  # fmt: skip


def test_a_seed_is_a_schedule() -> None:
    first, again = run(7, ALL_FAULTS), run(7, ALL_FAULTS)
    assert (first.states, first.faults, first.virtual_s) == (again.states, again.faults, again.virtual_s)
    assert run(8, ALL_FAULTS).virtual_s != first.virtual_s


@pytest.mark.parametrize(
    ("fault", "rate"),
    [
        *((fault, 0.25) for fault in ("lost", "late", "duplicated", "corrupted", "slow", "missed", "broken")),
        ("raised", 0.05),  # of a plan, and a prompt takes many
        ("ssd_failed", 0.5),
        ("rotten", 20.0),
        ("ssd_outages", 5.0),
        ("nic_outages", 10.0),
    ],
)
def test_one_kind_of_fault_at_a_high_rate(fault: str, rate: float) -> None:
    slow = {"slow": 0.25} if fault == "missed" else {}  # heartbeats only beat while something takes its time
    injected = 0
    for seed in range(12):
        outcome = run(seed, Faults(**{fault: rate, **slow}))
        assert not outcome.problems, f"seed {seed}: {outcome.problems[0]}"
        injected += outcome.faults.get(TIMED.get(fault, fault), 0)
    assert injected > 0


def test_many_deaths_and_lost_pages_lose_no_request() -> None:
    for seed in range(25):
        outcome = run(seed, Faults(deaths=4.0) if seed % 2 else Faults(lost_pages=4.0))
        assert not outcome.problems, f"seed {seed}: {outcome.problems[0]}"
        assert set(outcome.states) == {"completed"}


def test_one_wrong_byte_changes_the_output() -> None:
    """The checking world would be worth nothing if it did not notice."""
    prompt = np.arange(9, dtype=np.int32)
    entries = b""
    before = b""
    for token in prompt.tolist():
        before = entry(before, token)
        entries += before
    right = next_token(entries, len(prompt))
    assert reference(prompt, 1) == [right]
    flipped = [bytes([*entries[:i], entries[i] ^ 1, *entries[i + 1 :]]) for i in range(len(entries))]
    wrong = [next_token(other, len(prompt)) for other in flipped]
    assert sum(token != right for token in wrong) > 0.95 * len(wrong)
