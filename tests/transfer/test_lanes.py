"""Lanes: who stands still holds up nobody else, who is late is told so, and who is idle is let go of."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from endpoint_peer import buffer_of

from mcjax.errors import AccessRefused, HandshakeRefused, TransferCancelled, TransferError, TransferTimeout
from mcjax.transfer.transports.endpoint import Capabilities, Exposed, RegionDescriptor, Spans
from mcjax.transfer.transports.lanes import Batch, LaneEndpoint
from mcjax.transfer.transports.regions import Region, Regions

PATIENCE_S = 20.0
ALL = Spans.of([(0, 0, 100)])


class Doors(LaneEndpoint[Region]):
    """Batches wait at the door of their peer until it is opened; then they are there."""

    name = "doors"
    capabilities = Capabilities(notify=False)

    def __init__(self, idle_s: float = 300.0):
        super().__init__("doors:here", idle_s)
        self.regions: Regions[Region] = Regions()
        self.doors: dict[str, threading.Event] = {}
        self.performed: list[str] = []
        self.parted: list[str] = []
        self.ended = False
        self.raises: Exception | None = None

    def show(self, nbytes: int = 100) -> Region:
        return self.regions.add(Region(self.address, buffer_of(nbytes, None)))

    def door(self, address: str) -> threading.Event:
        return self.doors.setdefault(address, threading.Event())

    def _own(self, local: Exposed) -> Region:
        if not isinstance(local, Region):
            raise AccessRefused("not mine")
        return local

    def _perform(self, batch: Batch[Region]) -> None:
        while not self.door(batch.remote.address).wait(0.005):
            if self._closing.is_set():
                raise TransferCancelled("closing")
        if self.raises is not None:
            raise self.raises
        self.performed.append(batch.remote.address)

    def _part(self, address: str) -> None:
        self.parted.append(address)

    def _end(self) -> None:
        self.ended = True


@pytest.fixture
def doors() -> Iterator[Doors]:
    made = Doors()
    yield made
    made.close()


def at(name: str, nbytes: int = 100, **more) -> RegionDescriptor:
    return RegionDescriptor(f"doors:{name}", 1, nbytes, 0, **more)


def kinds(pending) -> dict[int, type]:
    return {index: type(error) for index, error in pending.result(PATIENCE_S).errors.items()}


def test_one_that_stands_still_holds_up_only_who_wants_it(doors: Doors) -> None:
    local = doors.show()
    doors.door("doors:quick").set()
    stuck = doors.read(local, at("slow"), ALL)
    assert not kinds(doors.read(local, at("quick"), ALL))
    behind = doors.read(local, at("slow"), ALL, deadline_s=0.05)
    assert kinds(behind) == {0: TransferTimeout}, "its turn has not come"
    assert not stuck.done()
    doors.door("doors:slow").set()
    assert not kinds(stuck)
    assert doors.performed == ["doors:quick", "doors:slow"], "what was late is not performed after all"


def test_what_was_given_up_before_its_turn_is_not_performed(doors: Doors) -> None:
    local = doors.show()
    first, second = doors.read(local, at("a"), ALL), doors.read(local, at("a"), ALL)
    second.abandon()
    doors.door("doors:a").set()
    assert not kinds(first)
    assert kinds(second) == {0: TransferCancelled}
    assert doors.performed == ["doors:a"]


def test_closing_answers_everything_after_the_end(doors: Doors) -> None:
    local = doors.show()
    pending = [doors.read(local, at(name), ALL) for name in ("a", "a", "b")]
    told = []
    for one in pending:
        one.add_done_callback(lambda _: told.append(doors.ended))
    doors.close()
    assert [kinds(one) for one in pending] == [{0: TransferCancelled}] * 3
    assert all(told), "while the mechanism might still write, nobody is told"
    assert kinds(doors.read(local, at("a"), ALL)) == {0: TransferCancelled}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mcjax-doors")]
    assert doors.stats().in_flight_bytes == 0


def test_a_lane_that_nobody_uses_ends_and_begins_again() -> None:
    doors = Doors(idle_s=0.02)
    try:
        local = doors.show()
        doors.door("doors:a").set()
        for number in range(1, 4):
            assert not kinds(doors.read(local, at("a"), ALL))
            end = time.monotonic() + PATIENCE_S
            while doors._lanes:
                assert time.monotonic() < end
                time.sleep(0.005)
            assert len(doors.parted) >= number
        assert len(doors.performed) == 3
    finally:
        doors.close()


def test_nothing_is_lost_between_the_end_of_a_lane_and_the_next_batch() -> None:
    doors = Doors(idle_s=0.0005)
    try:
        local = doors.show()
        doors.door("doors:a").set()
        for number in range(300):
            assert not kinds(doors.read(local, at("a"), ALL))
            if number % 3 == 0:
                time.sleep(0.0005)
        assert len(doors.performed) == 300
    finally:
        doors.close()


def test_whatever_is_raised_is_told_with_a_type(doors: Doors, caplog: pytest.LogCaptureFixture) -> None:
    local = doors.show()
    doors.door("doors:a").set()
    doors.raises = ZeroDivisionError("of a library")
    results = doors.read(local, at("a"), ALL).result(PATIENCE_S)
    assert type(results.errors[0]) is TransferError
    assert "ZeroDivisionError" in results.errors[0].problem
    assert doors.stats().errors == 1


@pytest.mark.parametrize(
    ("write", "remote", "more", "kind"),
    [
        (False, RegionDescriptor("pigeons:there", 1, 100, 0), {}, HandshakeRefused),
        (True, at("a", writable=False), {}, AccessRefused),
        (True, at("a"), {"notify": 7}, AccessRefused),
        (False, at("a", nbytes=50), {}, AccessRefused),
        (False, at("a", nbytes=1 << 100), {}, None),
    ],
)
def test_what_is_known_to_be_wrong_is_not_performed(doors: Doors, write, remote, more, kind) -> None:
    local = doors.show()
    doors.door("doors:a").set()
    pending = (doors.write if write else doors.read)(local, remote, ALL, **more)
    assert kinds(pending) == ({} if kind is None else {0: kind})
    assert bool(doors.performed) == (kind is None)
    stats = doors.stats()
    assert (stats.spans, stats.errors, stats.in_flight_bytes) == (1, int(kind is not None), 0)


def test_a_buffer_that_cannot_be_written_is_not_read_into(doors: Doors) -> None:
    buffer = np.frombuffer(bytes(100), np.uint8)
    region = doors.regions.add(Region(doors.address, buffer, writable=False))
    assert kinds(doors.read(region, at("a"), ALL)) == {0: AccessRefused}
