"""Both sides of the control connection prove the secret before anything else, and its messages survive any cutting."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcjax.errors import HandshakeRefused
from mcjax.transfer.transports.rdma.greeting import KIND, Called, Calling
from mcjax.transfer.transports.rdma.queue_pair import Place
from mcjax.transfer.transports.rdma.wire import BrokenWire, Message, Wire
from mcjax.transfer.transports.secret import Secret
from mcjax.transfer.transports.tcp.handshake import hello

SECRET = Secret(b"sixteen bytes or more")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Wire]]:
    listener = socket.create_server(("127.0.0.1", 0))
    raw = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    wire = Wire(accepted)
    yield raw, wire
    for each in (listener, raw, wire):
        each.close()


def test_both_prove_the_secret(pair: tuple[socket.socket, Wire]) -> None:
    """Over a real connection; what follows are messages."""
    raw, wire = pair
    other = Wire(raw)
    calling, called = Calling(SECRET), Called(SECRET)
    calling.begin(other)
    for _ in range(1000):
        called.go_on(wire)
        calling.go_on(other)
        if calling.done and called.done:
            break
    assert calling.done
    assert called.done
    other.send({"then": 1})
    assert received(wire, 1) == [{"then": 1}]


@pytest.mark.parametrize("other", [Called(Secret(b"another one of its kind")), Called(SECRET)])
def test_who_proves_nothing_is_let_go(pair: tuple[socket.socket, Wire], other: Called) -> None:
    raw, wire = pair
    raw.sendall(hello(KIND) + bytes(32))
    with pytest.raises(HandshakeRefused, match="does not know the secret"):
        hear_out(other, wire)
    assert not other.done


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n" * 10, bytes(200), hello(b"tcp") + bytes(99)])
def test_another_kind_is_refused(pair: tuple[socket.socket, Wire], garbage: bytes) -> None:
    raw, wire = pair
    raw.sendall(garbage)
    called = Called(SECRET)
    with pytest.raises(HandshakeRefused):
        hear_out(called, wire)
    assert not called.done


def received(wire: Wire, count: int) -> list[Message]:
    wire.socket.settimeout(0)
    messages: list[Message] = []
    for _ in range(100_000):
        messages += wire.receive()
        if len(messages) >= count:
            break
    return messages


def hear_out(called: Called, wire: Wire) -> None:
    for _ in range(100_000):
        called.go_on(wire)


def framed(text: bytes) -> bytes:
    return len(text).to_bytes(4, "big") + text


@pytest.mark.parametrize("cut", [1, 3, 5, 1000])
def test_messages_survive_any_cutting(pair: tuple[socket.socket, Wire], cut: int) -> None:
    raw, wire = pair
    messages: list[Message] = [{"n": n, "text": "é" * n} for n in range(20)]
    whole = b"".join(framed(json.dumps(message).encode()) for message in messages)
    for start in range(0, len(whole), cut):
        raw.sendall(whole[start : start + cut])
    assert received(wire, 20) == messages


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"7", b"\xff\xfe", b"[" * 4000])
def test_what_is_no_message_ends_the_connection(pair: tuple[socket.socket, Wire], text: bytes) -> None:
    raw, wire = pair
    raw.sendall(framed(text))
    with pytest.raises(BrokenWire):
        received(wire, 1)


def test_a_stranger_may_not_say_much(pair: tuple[socket.socket, Wire]) -> None:
    raw, wire = pair
    raw.sendall((5000).to_bytes(4, "big"))
    with pytest.raises(BrokenWire, match="5000 bytes"):
        received(wire, 1)


def test_who_is_trusted_may_say_more(pair: tuple[socket.socket, Wire]) -> None:
    raw, wire = pair
    wire.trust()
    raw.sendall(framed(json.dumps({"x": "y" * 9000}).encode()))
    assert received(wire, 1) == [{"x": "y" * 9000}]
    raw.sendall((1 << 30).to_bytes(4, "big"))
    with pytest.raises(BrokenWire):
        received(wire, 1)


def test_who_takes_nothing_is_not_waited_for(pair: tuple[socket.socket, Wire]) -> None:
    _, wire = pair
    message = {"x": "y" * (4 << 20)}

    def send_for_ever() -> None:
        for _ in range(100):
            wire.send(message)

    with pytest.raises(BrokenWire, match="takes no messages"):
        send_for_ever()


def test_the_end_is_told_after_the_last_message(pair: tuple[socket.socket, Wire]) -> None:
    raw, wire = pair
    raw.sendall(framed(b'{"last": 1}'))
    raw.close()
    assert received(wire, 1) == [{"last": 1}]
    with pytest.raises(BrokenWire, match="closed"):
        received(wire, 1)


PLACE = Place(5, 6, "0000:0000:0000:0000:0000:ffff:7f00:0001", 0, 5, 16)


def test_a_place_travels() -> None:
    assert Place.of(json.loads(json.dumps(PLACE.message()))) == PLACE


@given(name=st.sampled_from(sorted(PLACE.message())), value=JSON | st.integers(1 << 24))
def test_a_place_of_nonsense_is_none(name: str, value: object) -> None:
    message = {**PLACE.message(), name: value}
    try:
        place = Place.of(message)
    except BrokenWire:
        return
    assert 0 <= place.number < 1 << 24
    assert 0 <= place.mtu <= 5
    assert len(place.gid) == 39
