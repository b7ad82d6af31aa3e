"""The control connection of the jax endpoint, without jax: what is offered, to whom, and when it is taken back."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from endpoint_peer import pattern
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.transfer.transports.jax_offers import MOST_OFFER_BYTES, OfferClient, OfferServer
from mcjax.transfer.transports.tcp.frames import MAGIC, READ, REQUEST, WRITE, FrameError, Request, Status, pack_table
from mcjax.transfer.transports.tcp.regions import Region, Regions
from mcjax.transfer.transports.tcp.server import Session
from mcjax.transfer.transports.tcp.wire import Disconnected, wire_of


class Owner:
    """A server of offers, what it has put up, and what became of each offer."""

    def __init__(self) -> None:
        self.regions = Regions()
        self.up: dict[int, np.ndarray] = {}
        self.taken: dict[int, bool] = {}
        self.server = OfferServer(self.regions, "pull:here", self.up.__setitem__, self._take_back)
        self.ended = threading.Event()

    def _take_back(self, number: int, taken: bool) -> None:
        self.up.pop(number)
        assert number not in self.taken, "once each"
        self.taken[number] = taken

    def show(self, nbytes: int, seed: int, **options) -> Region:
        return self.regions.add(Region("jax:here", pattern(nbytes, seed).copy(), **options))

    def serve(self, sock: socket.socket) -> None:
        def end(session: Session) -> None:
            self.server.gone(session)
            self.ended.set()

        Session(wire_of(sock, 10.0), self.server, end, "jax").start()


@pytest.fixture
def owner() -> Owner:
    return Owner()


@contextlib.contextmanager
def connected(owner: Owner) -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        owner.serve(listener.accept()[0])
    ours.settimeout(20.0)
    with ours:
        yield ours
    assert owner.ended.wait(20.0)


@pytest.fixture
def client(owner: Owner) -> Iterator[OfferClient]:
    with connected(owner) as sock:
        yield OfferClient(wire_of(sock, 20.0))


def ask(client: OfferClient, region: Region, *spans: tuple[int, int], epoch: int | None = None, key: int | None = None):
    table = np.array(spans, np.int64)
    wanted = region.epoch if epoch is None else epoch
    return client.ask(region.key if key is None else key, wanted, table[:, 0].copy(), table[:, 1].copy())


def test_what_is_asked_for_is_offered_and_kept_until_it_is_taken(owner: Owner, client: OfferClient) -> None:
    region = owner.show(1000, 1)
    offer = ask(client, region, (900, 100), (0, 5))
    assert offer.address == "pull:here"
    assert offer.statuses.tolist() == [Status.OK, Status.OK]
    expected = pattern(1000, 1)
    np.testing.assert_array_equal(owner.up[offer.number], np.concatenate([expected[900:], expected[:5]]))
    region.buffer[:] = 0
    assert owner.up[offer.number].any(), "a copy, which nobody changes"
    client.acknowledge(offer)
    ask(client, region, (0, 1))  # one frame after the other: the first has been read by now
    assert owner.taken == {offer.number: True}


def test_the_next_request_takes_back_what_was_not_taken(owner: Owner, client: OfferClient) -> None:
    region = owner.show(1000, 1)
    first, second = ask(client, region, (0, 10)), ask(client, region, (0, 10))
    assert first.number != second.number
    assert owner.taken == {first.number: False}
    assert set(owner.up) == {second.number}


def test_the_end_of_the_connection_takes_it_back(owner: Owner) -> None:
    region = owner.show(1000, 1)
    with connected(owner) as sock:
        offer = ask(OfferClient(wire_of(sock, 20.0)), region, (0, 10))
    assert owner.taken == {offer.number: False}
    assert not owner.up


def test_each_span_is_judged_by_itself(owner: Owner, client: OfferClient) -> None:
    region = owner.show(1000, 1, guard=lambda offset, nbytes, epoch: offset != 500)
    offer = ask(client, region, (0, 10), (995, 10), (500, 10), (-1, 1), (990, 10))
    ok, outside, stale = Status.OK, Status.OUTSIDE, Status.STALE
    assert offer.statuses.tolist() == [ok, outside, stale, outside, ok]
    expected = pattern(1000, 1)
    np.testing.assert_array_equal(owner.up[offer.number], np.concatenate([expected[:10], expected[990:]]))
    assert owner.server.refused == 3


@pytest.mark.parametrize("how", ["key", "epoch", "withdrawn"])
def test_nothing_is_offered_of_what_is_not_shown(owner: Owner, client: OfferClient, how: str) -> None:
    region = owner.show(1000, 1)
    epoch = region.epoch
    if how == "epoch":
        region.advance()
    elif how == "withdrawn":
        owner.regions.withdraw(region)
    offer = ask(client, region, (0, 10), (20, 10), epoch=epoch, key=region.key ^ (how == "key"))
    assert not (offer.statuses == Status.OK).any()
    assert not owner.up
    assert owner.server.refused == 2


def test_bytes_that_change_hands_while_they_are_copied_are_not_offered(owner: Owner, client: OfferClient) -> None:
    asked = []

    def guard(offset: int, nbytes: int, epoch: int) -> bool:
        asked.append(offset)
        return asked.count(offset) == 1 or offset != 20

    region = owner.show(1000, 1, guard=guard)
    offer = ask(client, region, (0, 10), (20, 10), (40, 10))
    assert offer.statuses.tolist() == [Status.OK, Status.STALE, Status.OK]
    expected = pattern(1000, 1)
    np.testing.assert_array_equal(owner.up[offer.number], np.concatenate([expected[:10], expected[40:50]]))


def test_numbers_are_never_the_same_and_fit_63_bits(owner: Owner) -> None:
    numbers = [owner.server.fresh_number() for _ in range(20_000)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 < number < 1 << 63 for number in numbers)


def drained(sock: socket.socket) -> bytes:
    """All that comes until the connection ends, be it with a reset (of what was not read there)."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while more := sock.recv(1 << 16):
            found += more
    return found


FRAMES = {
    "a write": Request(WRITE, 1, 2, 0, 1, 10).pack() + pack_table(np.array([0]), np.array([10])),
    "too much": Request(READ, 1, 2, 0, 1, MOST_OFFER_BYTES + 1).pack(),
    "lengths that do not add up": Request(READ, 1, 2, 0, 1, 11).pack() + pack_table(np.array([0]), np.array([10])),
    "an acknowledgement of nothing": REQUEST.pack(MAGIC, 0x12, 0, 0, 0, 7, 0, 0, 0, 0),
}


@pytest.mark.parametrize("what", sorted(FRAMES))
def test_a_frame_that_lies_ends_the_connection(owner: Owner, what: str) -> None:
    owner.show(1000, 1)
    with connected(owner) as sock:
        sock.sendall(FRAMES[what])
        assert not drained(sock)
    assert not owner.up
    assert owner.server.refused == 1


@settings(deadline=None, max_examples=60)
@given(
    flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), min_size=1, max_size=6),
    cut=st.integers(0, 200),
)
def test_bytes_that_were_changed_do_no_harm(flips: list[tuple[int, int]], cut: int) -> None:
    """Whatever comes: an answer to a request that parses, or the end of the connection; and another one is served."""
    owner = Owner()
    region = owner.show(1000, 1)
    good = Request(READ, 1, region.key, 0, 2, 30).pack() + pack_table(np.array([0, 500]), np.array([10, 20]))
    frame = bytearray(good[: len(good) - cut] if cut < len(good) else good)
    for place, change in flips:
        frame[place % len(frame)] ^= change
    with connected(owner) as sock:
        sock.sendall(frame)
        with contextlib.suppress(OSError):  # the owner may have reset it already
            sock.shutdown(socket.SHUT_WR)
        drained(sock)
    assert not owner.up, "nothing stays of a connection that has ended"
    owner.ended.clear()
    with connected(owner) as sock:
        offer = ask(OfferClient(wire_of(sock, 20.0)), region, (0, 10))
        np.testing.assert_array_equal(owner.up[offer.number], pattern(1000, 1)[:10])


@pytest.mark.parametrize("answer", [b"", b"\0" * 200, b"\xff" * 200])
def test_a_reader_does_not_believe_an_owner_either(answer: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(answer)
        theirs.shutdown(socket.SHUT_WR)
        client = OfferClient(wire_of_pair(ours))
        with pytest.raises((FrameError, Disconnected)):
            client.ask(1, 0, np.array([0]), np.array([10]))


def wire_of_pair(sock: socket.socket):
    from mcjax.transfer.transports.tcp.wire import PlainWire

    return PlainWire(sock)
