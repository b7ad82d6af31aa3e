"""Who gets in, who does not, and what those who do not can spoil: nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from mcjax.errors import AccessRefused, ConfigError, HandshakeRefused, PeerLost, TransportUnavailable
from mcjax.transfer.transports.endpoint import SpanResults, Spans
from mcjax.transfer.transports.secret import Secret
from mcjax.transfer.transports.tcp import TcpEndpoint, door, frames
from mcjax.transfer.transports.tcp.dial import Dialer, format_address, parse_address
from mcjax.transfer.transports.tcp.handshake import (
    HELLO,
    MAGIC,
    VERDICT_BYTES,
    VERSION,
    ClientHandshake,
    ServerHandshake,
    hello,
)

SECRET = Secret(b"the secret of these tests")
PATIENCE_S = 30.0
"""A bound on hangs."""


@pytest.fixture
def endpoint() -> Iterator[TcpEndpoint]:
    endpoint = TcpEndpoint(SECRET, handshake_s=4 * PATIENCE_S)
    yield endpoint
    endpoint.close()


def call(endpoint: TcpEndpoint) -> socket.socket:
    sock = socket.create_connection(parse_address(endpoint.address))
    sock.settimeout(PATIENCE_S)
    return sock


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def everything(sock: socket.socket) -> bytes:
    """What comes until the other side closes."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while more := sock.recv(4096):
            received += more
    return received


def exactly(sock: socket.socket, nbytes: int) -> bytes:
    return sock.recv(nbytes, socket.MSG_WAITALL)


def a_read(asker: TcpEndpoint, shower: TcpEndpoint) -> SpanResults:
    shown = shower.expose(np.arange(100, dtype=np.uint8))
    local = asker.expose(np.zeros(100, np.uint8))
    results = asker.read(local, shown.descriptor(), Spans.of([(0, 0, 100)]), deadline_s=PATIENCE_S).result(PATIENCE_S)
    assert (local.buffer == (0 if results.errors else shown.buffer)).all()
    return results


@contextlib.contextmanager
def impostor(answers: list[bytes], version: int = VERSION) -> Iterator[str]:
    """Something that listens, and says the answers one by one, whatever it hears. The address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                with sock:
                    for answer in answers:
                        sock.recv(1000)
                        sock.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield format_address(*listener.getsockname())
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def dial(address: str, secret: Secret = SECRET, handshake_s: float = PATIENCE_S) -> None:
    Dialer(secret, None, handshake_s).dial(address, lambda sock: None).close()


def test_both_sides_prove_that_they_know_the_secret() -> None:
    server, client = ServerHandshake(SECRET), ClientHandshake(SECRET)
    answer, problem = server.feed(client.hello)
    assert problem is None
    verdict, problem = server.feed(client.prove(answer))
    assert problem is None
    assert not server.wanted
    client.conclude(verdict)


def test_bytes_may_come_one_by_one() -> None:
    server, client = ServerHandshake(SECRET), ClientHandshake(SECRET)
    answers = [server.feed(client.hello[at : at + 1])[0] for at in range(HELLO.size)]
    assert not any(answers[:-1])
    assert len(answers[-1]) == HELLO.size


def test_another_secret_is_refused_by_both_sides(endpoint: TcpEndpoint) -> None:
    stranger = TcpEndpoint(Secret(b"a secret of somebody else"))
    try:
        for asker, shower in ((stranger, endpoint), (endpoint, stranger)):
            error = a_read(asker, shower).errors[0]
            assert isinstance(error, HandshakeRefused)
            assert "secret" in error.problem
            until(lambda shower=shower: shower.stats().refused == 1)
    finally:
        stranger.close()


def test_a_server_that_takes_anybody_is_not_believed() -> None:
    welcome = bytes(VERDICT_BYTES)
    with impostor([hello(), welcome]) as address, pytest.raises(HandshakeRefused, match="does not know the secret"):
        dial(address)


def test_what_a_peer_says_is_no_good_to_it_when_it_is_sent_back(endpoint: TcpEndpoint) -> None:
    """Reflection: an attacker who does not know the secret has the endpoint itself answer for him."""
    with call(endpoint) as first, call(endpoint) as second:
        first.sendall(hello())
        challenge = exactly(first, HELLO.size)
        # The endpoint's own challenge, put to it on another connection, in the hope of a proof to send on the first.
        second.sendall(challenge)
        exactly(second, HELLO.size)
        second.sendall(bytes(32))
        stolen = everything(second)
        first.sendall(stolen[1:33])
        assert everything(first)[0] != 0


def test_a_servers_proof_is_none_of_a_client() -> None:
    """Between two honest endpoints: what one proves as the server proves nothing when it is sent back as a client's."""
    server, client = ServerHandshake(SECRET), ClientHandshake(SECRET)
    answer, _ = server.feed(client.hello)
    verdict, _ = server.feed(client.prove(answer))
    other = ServerHandshake(SECRET)
    other.feed(client.hello)
    _, problem = other.feed(verdict[1:])
    assert problem is not None
    with pytest.raises(HandshakeRefused):
        client.conclude(b"\0" + client.prove(answer))


def test_a_recorded_handshake_opens_nothing(endpoint: TcpEndpoint) -> None:
    client = ClientHandshake(SECRET)
    with call(endpoint) as sock:
        sock.sendall(client.hello)
        proof = client.prove(exactly(sock, HELLO.size))
        sock.sendall(proof)
        client.conclude(exactly(sock, VERDICT_BYTES))
    with call(endpoint) as sock:
        sock.sendall(client.hello)
        exactly(sock, HELLO.size)
        sock.sendall(proof)
        assert everything(sock)[0] != 0


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (HELLO.pack(MAGIC, b"tcp", VERSION + 1, bytes(32)), f"version {VERSION + 1}"),
        (HELLO.pack(MAGIC, b"shm", VERSION, bytes(32)), "'shm'"),
        (HELLO.pack(b"SSH-2.0-", b"Open", 0, bytes(32)), "no endpoint of mcjax"),
        (b"\x15\x03\x03".ljust(HELLO.size, b"\0"), "TLS"),
    ],
    ids=["version", "kind", "stranger", "tls"],
)
def test_what_is_something_else_is_named(endpoint: TcpEndpoint, raw: bytes, words: str) -> None:
    with impostor([raw]) as address, pytest.raises(HandshakeRefused, match=words):
        dial(address)
    # And the other way round: a hello so that the other side can say the same, then nothing.
    with call(endpoint) as sock:
        sock.sendall(raw)
        answer = everything(sock)
        assert HELLO.unpack(answer)[:3] == (MAGIC, b"tcp".ljust(8, b"\0"), VERSION)
    assert endpoint.stats().refused == 1


def test_a_peer_that_says_nothing_is_given_up_in_time() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, pytest.raises(PeerLost, match="did not answer"):
        dial(format_address(*listener.getsockname()), handshake_s=0.2)


def test_nothing_is_parsed_before_the_handshake(endpoint: TcpEndpoint) -> None:
    shown = endpoint.expose(np.zeros(100, np.uint8))
    write = frames.Request(frames.WRITE, 1, shown.key, 0, 1, 100).pack()
    write += frames.pack_table(np.array([0]), np.array([100])) + b"x" * 100
    with call(endpoint) as sock:
        sock.sendall(write)
        everything(sock)
    with call(endpoint) as sock:
        sock.sendall(hello() + write)
        everything(sock)
    assert not shown.buffer.any()


def test_half_open_connections_are_dropped() -> None:
    endpoint = TcpEndpoint(SECRET, handshake_s=0.3)
    try:
        with call(endpoint) as silent, call(endpoint) as slow:
            slow.sendall(hello()[:10])
            assert everything(silent) == b""
            assert everything(slow) == b""
    finally:
        endpoint.close()


def test_a_flood_of_half_open_connections_shuts_nobody_out(endpoint: TcpEndpoint) -> None:
    threads = threading.active_count()
    with contextlib.ExitStack() as flood:
        socks = [flood.enter_context(call(endpoint)) for _ in range(door.MOST_STRANGERS + 60)]
        friend = TcpEndpoint(SECRET)
        try:
            assert not a_read(friend, endpoint).errors
            # The friend's own: a door, a connection, a watch, and the session that serves it here.
            assert threading.active_count() <= threads + 4
            assert everything(socks[0]) == b"", "the eldest had to go"
        finally:
            friend.close()


def test_connections_are_bounded_and_who_is_refused_is_told() -> None:
    endpoint, friends = TcpEndpoint(SECRET, most_connections=2), [TcpEndpoint(SECRET) for _ in range(3)]
    try:
        assert not a_read(friends[0], endpoint).errors
        assert not a_read(friends[1], endpoint).errors
        error = a_read(friends[2], endpoint).errors[0]
        assert isinstance(error, PeerLost)
        assert "no room" in error.problem
        friends[0].close()
        until(lambda: not a_read(friends[2], endpoint).errors)
    finally:
        for one in (endpoint, *friends):
            one.close()


def test_loopback_unless_another_address_is_given() -> None:
    endpoint = TcpEndpoint(SECRET)
    assert endpoint.address.startswith("127.0.0.1:")
    endpoint.close()
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ConfigError, match="advertised"):
            TcpEndpoint(SECRET, host=host)
    endpoint = TcpEndpoint(SECRET, host="0.0.0.0", advertised="here:5")
    assert endpoint.address == "here:5"
    endpoint.close()


def test_the_other_internet_protocol() -> None:
    try:
        endpoint = TcpEndpoint(SECRET, host="::1")
    except TransportUnavailable as problem:
        pytest.skip(str(problem))
    asker = TcpEndpoint(SECRET)
    try:
        assert endpoint.address.startswith("[::1]:")
        assert not a_read(asker, endpoint).errors
    finally:
        endpoint.close()
        asker.close()


def test_addresses() -> None:
    for text, where in (("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:9", ("::1", 9)), ("a.b:65535", ("a.b", 65535))):
        assert parse_address(text) == where
        assert format_address(*where) == text
    for text in ("", ":", "a:", ":1", "a:0", "a:65536", "a:1x", "::1:5", "[]:5", "a:\N{ARABIC-INDIC DIGIT ONE}"):
        with pytest.raises(AccessRefused):
            parse_address(text)


def test_an_address_that_is_taken_is_said_to_be(endpoint: TcpEndpoint) -> None:
    with pytest.raises(TransportUnavailable, match="cannot listen"):
        TcpEndpoint(SECRET, port=parse_address(endpoint.address)[1])


@pytest.mark.parametrize("name", ["connections", "most_connections", "handshake_s", "stall_s", "idle_s"])
def test_limits_that_cannot_be(name: str) -> None:
    with pytest.raises(ConfigError, match=f"tcp.{name}"):
        TcpEndpoint(SECRET, **{name: 0})  # pyright: ignore[reportArgumentType]
