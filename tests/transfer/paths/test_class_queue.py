"""The queue of a path: classes in strict order, promised shares, and turns within a class."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mcjax.errors import ConfigError
from mcjax.transfer.paths.queue import ClassQueue, read_shares

SLICE = 100


@dataclass(eq=False)
class Entry:
    priority: int
    nbytes: int
    name: str = ""
    served: int = field(default=0)

    def next_bytes(self) -> int:
        return min(SLICE, self.nbytes - self.served)


def serve(queue: ClassQueue[Entry], most: int) -> list[Entry]:
    """So many slices, one after the other."""
    taken: list[Entry] = []
    while len(taken) < most and (entry := queue.take()) is not None:
        entry.served += entry.next_bytes()
        if entry.served < entry.nbytes:
            queue.push(entry)
        taken.append(entry)
    return taken


def test_a_higher_class_goes_first_from_the_next_slice_on() -> None:
    queue = ClassQueue[Entry]()
    queue.push(Entry(0, 500, "low"))
    assert [entry.name for entry in serve(queue, 2)] == ["low", "low"]
    queue.push(Entry(3, 200, "high"))
    assert [entry.name for entry in serve(queue, 9)] == ["high", "high", "low", "low", "low"]


def test_within_a_class_everybody_gets_a_slice_in_turn() -> None:
    queue = ClassQueue[Entry]()
    for name, nbytes in (("long", 400), ("short", 100), ("odd", 150)):
        queue.push(Entry(0, nbytes, name))
    assert [entry.name for entry in serve(queue, 9)] == ["long", "short", "odd", "long", "odd", "long", "long"]


def test_who_gives_up_is_not_served() -> None:
    queue = ClassQueue[Entry]({0: 0.5})
    first, second = Entry(0, 300, "first"), Entry(0, 100, "second")
    queue.push(first)
    queue.push(second)
    queue.discard(first)
    queue.discard(first)
    assert len(queue) == 1
    assert [entry.name for entry in serve(queue, 9)] == ["second"]
    assert queue.take() is None
    assert queue.peek() is None


def test_a_promised_share_is_kept_under_a_flood_and_the_rest_is_strict() -> None:
    queue = ClassQueue[Entry]({0: 0.2})
    queue.push(Entry(0, 10**6, "batch"))
    queue.push(Entry(1, 10**6, "middle"))
    queue.push(Entry(5, 10**6, "interactive"))
    names = [entry.name for entry in serve(queue, 1000)]
    assert 199 <= names.count("batch") <= 201
    assert names.count("middle") == 0
    assert names.count("interactive") == 1000 - names.count("batch")


def test_who_was_away_has_saved_nothing_up() -> None:
    queue = ClassQueue[Entry]({0: 0.5})
    queue.push(Entry(5, 10**6, "high"))
    serve(queue, 100)
    queue.push(Entry(0, 10**6, "low"))
    names = [entry.name for entry in serve(queue, 10)]
    assert names.count("low") in (4, 5, 6)


@settings(max_examples=60)
@given(
    shares=st.dictionaries(st.integers(0, 3), st.floats(0.01, 0.25), max_size=4),
    sizes=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3000)), min_size=1, max_size=20),
)
def test_every_waiting_class_gets_its_share_of_whatever_is_served(
    shares: dict[int, float], sizes: list[tuple[int, int]]
) -> None:
    queue = ClassQueue[Entry](shares)
    entries = [Entry(priority, nbytes) for priority, nbytes in sizes]
    for entry in entries:
        queue.push(entry)
    total, got = 0, dict.fromkeys(range(5), 0)
    while (entry := queue.take()) is not None:
        nbytes = entry.next_bytes()
        entry.served += nbytes
        total, got[entry.priority] = total + nbytes, got[entry.priority] + nbytes
        if entry.served < entry.nbytes:
            queue.push(entry)
        for priority, share in shares.items():
            if any(each.priority == priority and each.served < each.nbytes for each in entries):
                assert got[priority] >= share * total - SLICE * (len(shares) + 1)
    assert all(entry.served == entry.nbytes for entry in entries), "nobody is forgotten"


class AgainstAList(RuleBasedStateMachine):
    """Without shares, the queue is a list sorted by class, and by turn within it."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = ClassQueue[Entry]()
        self.model: list[Entry] = []

    @rule(priority=st.integers(0, 3), nbytes=st.integers(1, 350))
    def push(self, priority: int, nbytes: int) -> None:
        entry = Entry(priority, nbytes)
        self.queue.push(entry)
        self.model.append(entry)

    @rule()
    def take(self) -> None:
        expected = max(self.model, key=lambda entry: entry.priority, default=None)  # the first of the highest class
        assert self.queue.peek() is expected
        assert self.queue.take() is expected
        if expected is not None:
            self.model.remove(expected)
            expected.served += expected.next_bytes()
            if expected.served < expected.nbytes:
                self.queue.push(expected)
                self.model.append(expected)

    @rule(which=st.integers(0, 1000))
    def discard(self, which: int) -> None:
        if self.model:
            self.queue.discard(self.model.pop(which % len(self.model)))

    @invariant()
    def counts(self) -> None:
        assert len(self.queue) == len(self.model)


TestAgainstAList = AgainstAList.TestCase
TestAgainstAList.settings = settings(max_examples=40)


@pytest.mark.parametrize(
    ("shares", "key"),
    [
        ({"low": 0.1}, "transfer.shares.low"),
        ({0: 0.0}, "transfer.shares.0"),
        ({0: 1.5}, "transfer.shares.0"),
        ({0: True}, "transfer.shares.0"),
        ({0: "much"}, "transfer.shares.0"),
        ({0: 0.6, 1: 0.6}, "transfer.shares"),
        ([0.5], "transfer.shares"),
    ],
)
def test_shares_that_are_none_are_refused(shares: object, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_shares("transfer.shares", shares)
    assert caught.value.key == key


def test_shares_may_have_classes_as_text_and_be_none() -> None:
    assert read_shares("transfer.shares", None) == {}
    assert read_shares("transfer.shares", {"0": 0.25, -1: 0.5}) == {0: 0.25, -1: 0.5}
