"""What every block store keeps to, whatever it is made of: one state machine against books kept the plain way.

A test file says how to make a store and how its bytes are written and read (`Subject`), and runs `machine` of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mcjax.errors import IntegrityError, PoolFull
from mcjax.kvpool.base import BlockStore, Header
from mcjax.transfer.base import Region

CAPACITY = 6


class Subject(Protocol):
    """A store, empty, with `CAPACITY` slots, and the way to its bytes."""

    @property
    def store(self) -> BlockStore: ...

    def blocks(self, count: int) -> list[int]:
        """Ids of blocks that have never been named before."""
        ...

    def write(self, slots: Sequence[int], blocks: Sequence[int], parent: int | None) -> list[bytes]:
        """Fill reserved slots with `content` of the blocks; returns their checksums, empty ones without bytes."""
        ...

    def read(self, slot: int) -> bytes | None:
        """A slot's bytes; None where there are only sizes."""
        ...

    def close(self) -> None: ...


def content(block: int, nbytes: int) -> np.ndarray:
    """`[nbytes]` that tell one block from another."""
    step, first = 1 + block % 249, block % 251
    return ((np.arange(nbytes, dtype=np.int64) * step + first) % 251).astype(np.uint8)


class Counter:
    """Numbers blocks."""

    def __init__(self) -> None:
        self._next = 0

    def blocks(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))


@dataclass
class Slot:
    """One slot, as the plain books have it."""

    generation: int = 0
    holds: int = 0
    taken: bool = False
    block: int | None = None
    """Of the bytes that were written, committed or not."""
    header: Header | None = None


@dataclass
class Seen:
    """A region, and the generations of its slots when it was made."""

    region: Region
    generations: list[int] = field(default_factory=list)


picks = st.integers(0, 10**6)


class StoreMachine(RuleBasedStateMachine):
    """Everything a store can be asked to do, in any order."""

    def make_subject(self) -> Subject:
        """What `machine` was given."""
        raise AssertionError("made by `machine` only")

    def __init__(self) -> None:
        super().__init__()
        self.subject = self.make_subject()
        self.store = self.subject.store
        self.slots = [Slot() for _ in range(CAPACITY)]
        self.regions: list[Seen] = []
        self.held: list[Seen] = []
        self.woken = 0
        self.store.on_space = self.on_space

    def on_space(self) -> None:
        self.woken += 1

    def taken(self, written: bool | None = None, committed: bool | None = None) -> list[int]:
        return [
            number
            for number, slot in enumerate(self.slots)
            if slot.taken
            and (written is None or (slot.block is not None) == written)
            and (committed is None or (slot.header is not None) == committed)
        ]

    def available(self) -> list[int]:
        return [number for number, slot in enumerate(self.slots) if not slot.taken and not slot.holds]

    def see(self, slots: Sequence[int]) -> Seen:
        return Seen(self.store.regions(slots), [self.slots[slot].generation for slot in slots])

    @rule(count=st.integers(0, CAPACITY + 1))
    def reserve(self, count: int) -> None:
        free = self.available()
        if count > len(free):
            with pytest.raises(PoolFull):
                self.store.reserve(count)
            return
        given = self.store.reserve(count)
        assert len(given) == count == len(set(given))
        assert set(given) <= set(free)
        for slot in given:
            self.slots[slot].taken = True

    @precondition(lambda self: self.taken(committed=False))
    @rule(count=st.integers(1, 3), first=st.booleans())
    def write_and_commit(self, count: int, first: bool) -> None:
        slots = self.taken(committed=False)[:count]
        blocks = self.subject.blocks(len(slots))
        before = [slot.header.block for slot in self.slots if slot.header is not None]
        parent = before[-1] if before and not first else None
        checksums = self.subject.write(slots, blocks, parent)
        self.store.commit(slots, blocks, checksums, parent)
        for slot, block, checksum in zip(slots, blocks, checksums, strict=True):
            self.slots[slot].block, self.slots[slot].header = block, Header(block, checksum)

    @precondition(lambda self: self.taken())
    @rule(pick=picks, count=st.integers(1, 3))
    def free(self, pick: int, count: int) -> None:
        taken = self.taken()
        going = list(dict.fromkeys(taken[(pick + at) % len(taken)] for at in range(count)))
        self.store.free(iter(going))
        for number in going:
            slot = self.slots[number]
            slot.generation += 1
            slot.taken, slot.block, slot.header = False, None, None

    @precondition(lambda self: self.taken())
    @rule(pick=picks, count=st.integers(1, 3))
    def look(self, pick: int, count: int) -> None:
        taken = self.taken()
        self.regions.append(self.see(list(dict.fromkeys(taken[(pick + at) % len(taken)] for at in range(count)))))

    @precondition(lambda self: self.taken())
    @rule(pick=picks, again=st.booleans())
    def transfer_begins(self, pick: int, again: bool) -> None:
        taken = self.taken()
        seen = self.held[pick % len(self.held)] if again and self.held else self.see([taken[pick % len(taken)]])
        self.store.hold(seen.region)
        self.held.append(seen)
        for slot in seen.region.slots:
            self.slots[slot].holds += 1
        with pytest.raises(IntegrityError, match="transfers still hold"):
            self.store.check_idle()

    @precondition(lambda self: self.held)
    @rule(pick=picks)
    def transfer_ends(self, pick: int) -> None:
        seen, before, woken = self.held.pop(pick % len(self.held)), self.available(), self.woken
        for slot in seen.region.slots:
            self.slots[slot].holds -= 1
        self.store.let_go(seen.region)
        assert (self.woken > woken) == (self.available() != before), "told exactly when freed slots have come back"

    @rule()
    @precondition(lambda self: self.regions)
    def wipe(self) -> None:
        self.store.wipe()
        for slot in self.slots:
            slot.generation += 1
            slot.block = slot.header = None

    @invariant()
    def adds_up(self) -> None:
        store = self.store
        store.check_integrity()
        assert (store.capacity, store.free_slots) == (CAPACITY, len(self.available()))
        assert store.taken_slots == len(self.taken())
        for number, slot in enumerate(self.slots):
            assert store.header(number) == slot.header
        for seen in [*self.regions, *self.held]:
            expected = [self.slots[slot].generation for slot in seen.region.slots] == seen.generations
            assert seen.region.is_current() == expected
            assert seen.region.nbytes == len(seen.region.slots) * store.block_bytes

    @invariant()
    def bytes_stay_as_they_were_written(self) -> None:
        for number in self.taken(written=True):
            found, block = self.subject.read(number), self.slots[number].block
            assert block is not None
            assert found in (None, content(block, self.store.block_bytes).tobytes())

    def teardown(self) -> None:
        try:
            for seen in self.held:
                self.store.let_go(seen.region)
            self.store.free(self.taken())
            self.store.check_idle()
            self.store.check_integrity()
            assert self.store.free_slots == CAPACITY
        finally:
            self.subject.close()


def machine(make: Callable[[], Subject], examples: int, steps: int = 30) -> Any:
    """The test case of stores made by `make`."""
    case: Any = type("Machine", (StoreMachine,), {"make_subject": lambda self: make()}).TestCase
    case.settings = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    return case
