"""Paths are left alone after failures in a row, probed after a pause, and back with one success."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mcjax.transfer.paths.health import Health, Patience

PATIENCE = Patience(failures=3, backoff_ns=100, most_backoff_ns=1000)


def test_failures_in_a_row_and_no_others_take_a_path_away() -> None:
    health = Health(PATIENCE)
    for _ in range(2):
        health.failed(0)
        health.failed(0)
        assert health.may_try(0)
        health.succeeded()
    for _ in range(3):
        assert health.may_try(0)
        health.failed(0)
    assert not health.may_try(0)
    assert not health.may_try(99)
    assert health.may_try(100)


def test_one_copy_at_a_time_finds_out_and_pauses_double_up_to_a_bound() -> None:
    health = Health(PATIENCE)
    for _ in range(3):
        health.failed(0)
    now_ns, pauses = 0, list[int]()
    for _ in range(7):
        pauses.append(health.away_until_ns - now_ns)
        now_ns = health.away_until_ns
        assert health.begin(now_ns)
        assert not health.may_try(now_ns), "one probe is enough"
        assert not health.begin(now_ns)
        health.failed(now_ns, is_probe=True)
    assert pauses == [100, 200, 400, 800, 1000, 1000, 1000]
    assert health.begin(health.away_until_ns)
    health.succeeded(is_probe=True)
    assert health.may_try(now_ns)
    for _ in range(3):
        health.failed(now_ns)
    assert health.away_until_ns == now_ns + 100, "who was well again begins anew"


def test_copies_that_fail_together_lengthen_the_pause_once() -> None:
    health = Health(PATIENCE)
    for _ in range(50):
        health.failed(7)
    assert health.away_until_ns == 107


def test_a_probe_that_says_nothing_lets_the_next_one_try() -> None:
    health = Health(PATIENCE)
    for _ in range(3):
        health.failed(0)
    assert health.begin(100)
    health.undecided(is_probe=True)
    assert health.begin(100)


@given(times=st.integers(1, 10**9))
def test_no_pause_is_beyond_the_bound(times: int) -> None:
    assert PATIENCE.backoff_ns <= PATIENCE.pause_ns(times) <= PATIENCE.most_backoff_ns


class AnyHistory(RuleBasedStateMachine):
    """Whatever happens to however many copies, the path can be tried again within the longest pause."""

    def __init__(self) -> None:
        super().__init__()
        self.health = Health(PATIENCE)
        self.now_ns = 0
        self.under_way: list[bool] = []

    @rule()
    def begin(self) -> None:
        if self.health.may_try(self.now_ns):
            self.under_way.append(self.health.begin(self.now_ns))

    @precondition(lambda self: self.under_way)
    @rule(end=st.sampled_from(["arrived", "failed", "cancelled"]), which=st.integers(0, 100))
    def end(self, end: str, which: int) -> None:
        is_probe = self.under_way.pop(which % len(self.under_way))
        if end == "arrived":
            self.health.succeeded(is_probe)
            assert self.health.may_try(self.now_ns)
        elif end == "failed":
            self.health.failed(self.now_ns, is_probe)
        else:
            self.health.undecided(is_probe)

    @rule(ns=st.integers(1, 500))
    def wait(self, ns: int) -> None:
        self.now_ns += ns

    @invariant()
    def comes_back(self) -> None:
        assert self.health.away_until_ns <= self.now_ns + PATIENCE.most_backoff_ns
        assert sum(self.under_way) <= 1, "one probe at a time"
        if not any(self.under_way):
            assert self.health.may_try(self.now_ns + PATIENCE.most_backoff_ns)


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=40)
