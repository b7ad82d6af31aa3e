"""Connections to peers: kept, shared, poisoned, replaced; and peers that are slow, or stand still, or lie."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from endpoint_peer import Peer, buffer_of, pattern, peer_of

from mcjax.errors import AccessRefused, BlockCorrupt, PeerLost, StaleRegion, TransferCancelled, TransferTimeout
from mcjax.transfer.transports.endpoint import Pending, Spans
from mcjax.transfer.transports.secret import Secret
from mcjax.transfer.transports.tcp import TcpEndpoint, batch, frames, payload, peer
from mcjax.transfer.transports.tcp.batch import Batch
from mcjax.transfer.transports.tcp.dial import Dialer, format_address
from mcjax.transfer.transports.tcp.handshake import ServerHandshake
from mcjax.transfer.transports.tcp.regions import Region
from mcjax.transfer.transports.tcp.wire import PlainWire, after

SECRET = Secret(b"the secret of these tests")
PATIENCE_S = 30.0
"""A bound on hangs."""
MIB = 1 << 20


@pytest.fixture
def asker() -> Iterator[TcpEndpoint]:
    endpoint = TcpEndpoint(SECRET)
    yield endpoint
    endpoint.close()


@pytest.fixture
def shower() -> Iterator[TcpEndpoint]:
    endpoint = TcpEndpoint(SECRET, stall_s=0.5)
    yield endpoint
    endpoint.close()


@pytest.fixture
def child() -> Iterator[Peer]:
    child = peer_of("tcp", SECRET)
    yield child
    child.close()


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def kinds(pending: Pending) -> set[type]:
    return {type(error) for error in pending.result(PATIENCE_S).errors.values()}


def whole(nbytes: int) -> Spans:
    return Spans.of([(0, 0, nbytes)])


@contextlib.contextmanager
def scripted(*scripts: Callable[[socket.socket], object]) -> Iterator[str]:
    """A peer that shakes hands as it should and then does as it is told, a script a connection. The address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for script in scripts:
            with contextlib.suppress(OSError):
                sock, _ = listener.accept()
                with sock:
                    handshake = ServerHandshake(SECRET)
                    while handshake.wanted:
                        sock.sendall(handshake.feed(sock.recv(handshake.wanted))[0])
                    script(sock)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield format_address(*listener.getsockname())
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def sockets() -> int:
    """That this process has open."""
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the directory that was listed, for one
            count += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
    return count


def stop(child: Peer) -> None:
    """Returns when it does stand still."""
    child.stop()
    stat = Path(f"/proc/{child.process.pid}/stat")
    until(lambda: stat.read_text().rpartition(") ")[2][0] == "T")


def test_connections_are_kept_and_reused(asker: TcpEndpoint, child: Peer) -> None:
    remote, local = child.expose(1000, seed=1), asker.expose(buffer_of(1000, None))
    assert not asker.read(local, remote, whole(1000)).result(PATIENCE_S).errors
    before, threads = sockets(), threading.active_count()
    for _ in range(50):
        assert not asker.read(local, remote, whole(1000)).result(PATIENCE_S).errors
    assert sockets() == before
    assert threading.active_count() == threads


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 1 MiB, so that a batch of many need not be large."""
    monkeypatch.setattr(batch, "PART_BYTES", MIB)


@pytest.mark.usefixtures("small_parts")
def test_a_large_batch_goes_over_several_connections_and_no_more_than_allowed(child: Peer) -> None:
    asker = TcpEndpoint(SECRET, connections=3)
    try:
        nbytes = 20 * MIB
        remote, local = child.expose(nbytes, seed=1), asker.expose(buffer_of(nbytes, None))
        before = sockets()
        spans = Spans.of((at, at, MIB // 2) for at in range(0, nbytes, MIB // 2))
        reads = [asker.read(local, remote, spans) for _ in range(3)]
        for read in reads:
            assert not read.result(PATIENCE_S).errors
        assert sockets() == before + 3
        assert (local.buffer == pattern(nbytes, 1)).all()
    finally:
        asker.close()


def test_an_idle_connection_is_closed_and_opened_again(child: Peer) -> None:
    asker = TcpEndpoint(SECRET, idle_s=0.1)
    try:
        before = sockets()
        remote, local = child.expose(1000, seed=1), asker.expose(buffer_of(1000, None))
        for _ in range(2):
            assert not asker.read(local, remote, whole(1000)).result(PATIENCE_S).errors
            until(lambda: sockets() == before)
    finally:
        asker.close()


def test_ten_thousand_spans_in_any_order(asker: TcpEndpoint, child: Peer) -> None:
    count, nbytes = 10_000, 3000
    remote, local = child.expose(count * nbytes, seed=1), asker.expose(buffer_of(count * nbytes, None))
    order = np.random.default_rng(1).permutation(count)
    spans = Spans(np.arange(count) * nbytes, order * nbytes, np.full(count, nbytes))
    for checksums in (False, True):
        local.buffer[:] = 0
        results = asker.read(local, remote, spans, checksums=checksums).result(PATIENCE_S)
        assert not results.errors
        expected = pattern(count * nbytes, 1).reshape(count, nbytes)[order]
        assert (local.buffer == expected.ravel()).all()
        if checksums:
            assert list(results.checksums) == [xxhash.xxh3_128_digest(block.tobytes()) for block in expected]
    assert not asker.write(local, remote, spans, checksums=True).result(PATIENCE_S).errors
    assert child.digest(remote) == xxhash.xxh3_128(pattern(count * nbytes, 1).tobytes()).hexdigest()


def test_a_batch_past_its_deadline_poisons_its_connection_and_nothing_else(asker: TcpEndpoint, child: Peer) -> None:
    remote, local = child.expose(64 * MIB, seed=1), asker.expose(buffer_of(64 * MIB, None))
    assert not asker.read(local, remote, whole(1000)).result(PATIENCE_S).errors
    stop(child)
    late = asker.read(local, remote, whole(64 * MIB), deadline_s=0.2)
    assert kinds(late) == {TransferTimeout}
    local.buffer[:] = 7
    child.go_on()
    other = asker.expose(buffer_of(1000, None))
    assert not asker.read(other, remote, whole(1000)).result(PATIENCE_S).errors
    assert (other.buffer == pattern(64 * MIB, 1)[:1000]).all()
    assert (local.buffer == 7).all()


def test_what_was_not_sent_by_the_deadline_never_is(asker: TcpEndpoint) -> None:
    """The connection is reset before the answer, with all that this side's kernel still held."""
    answered, ends = threading.Event(), list[str]()

    def script(sock: socket.socket) -> None:
        answered.wait(PATIENCE_S)
        sock.settimeout(PATIENCE_S)
        try:
            while sock.recv(MIB):
                pass
            ends.append("end")
        except ConnectionResetError:
            ends.append("reset")

    local = asker.expose(buffer_of(64 * MIB, 1))
    with scripted(script) as address:
        remote = batch.RegionDescriptor(address, 5, 64 * MIB, 0)
        assert kinds(asker.write(local, remote, whole(64 * MIB), deadline_s=0.3)) == {TransferTimeout}
        answered.set()
    assert ends == ["reset"]


def test_waiting_behind_others_does_not_outlast_the_deadline(child: Peer) -> None:
    asker = TcpEndpoint(SECRET, connections=1)
    try:
        remote, local = child.expose(1000, seed=1), asker.expose(buffer_of(1000, None))
        assert not asker.read(local, remote, whole(1000)).result(PATIENCE_S).errors
        stop(child)
        first = asker.read(local, remote, whole(1000), deadline_s=PATIENCE_S)
        behind = [asker.read(local, remote, whole(1000), deadline_s=0.1) for _ in range(20)]
        assert {kind for each in behind for kind in kinds(each)} == {TransferTimeout}
        assert not first.done()
        child.go_on()
        assert not first.result(PATIENCE_S).errors
    finally:
        asker.close()


@pytest.mark.usefixtures("small_parts")
def test_a_small_batch_does_not_wait_for_all_of_a_large_one(child: Peer) -> None:
    """Parts take turns: on one connection, it is done while most of the large one is still to come."""
    asker = TcpEndpoint(SECRET, connections=1)
    try:
        nbytes = 30 * MIB
        remote, local = child.expose(nbytes, seed=1), asker.expose(buffer_of(nbytes, None))
        large = asker.read(local, remote, Spans.of((at, at, MIB) for at in range(0, nbytes, MIB)))
        order: list[str] = []
        large.add_done_callback(lambda _: order.append("large"))
        small = asker.read(local, remote, whole(10))
        small.add_done_callback(lambda _: order.append("small"))
        assert not large.result(PATIENCE_S).errors
        assert order == ["small", "large"]
    finally:
        asker.close()


def test_a_peer_that_reads_slowly_is_let_go_and_starves_nobody(asker: TcpEndpoint, shower: TcpEndpoint) -> None:
    shown = shower.expose(buffer_of(64 * MIB, 1))
    wire = Dialer(SECRET, None, PATIENCE_S).dial(shower.address, lambda sock: None)
    request = frames.Request(frames.READ, 1, shown.key, 0, 1, 64 * MIB).pack()
    wire.send([memoryview(request + frames.pack_table(np.array([0]), np.array([64 * MIB])))])
    local = asker.expose(buffer_of(MIB, None))
    for _ in range(20):
        assert not asker.read(local, shown.descriptor(), whole(MIB)).result(PATIENCE_S).errors
    # It has taken nothing all the while, and is disconnected: its thread and its use of the region end.
    until(lambda: len(shower._sessions) == 1)
    shower.withdraw(shown)
    wire.close()


def test_a_peer_that_writes_slowly_is_let_go(shower: TcpEndpoint) -> None:
    shown = shower.expose(buffer_of(1000, None))
    wire = Dialer(SECRET, None, PATIENCE_S).dial(shower.address, lambda sock: None)
    request = frames.Request(frames.WRITE, 1, shown.key, 0, 1, 1000).pack()
    wire.send([memoryview(request + frames.pack_table(np.array([0]), np.array([1000])) + b"some")])
    until(lambda: len(shower._sessions) == 1)
    until(lambda: not shower._sessions)
    wire.close()


def test_a_region_is_withdrawn_from_under_a_peer_that_stands_still(shower: TcpEndpoint) -> None:
    """In the middle of a payload: then the connection goes, and not a byte lands any more."""
    shown = shower.expose(buffer_of(1000, None))
    wire = Dialer(SECRET, None, PATIENCE_S).dial(shower.address, lambda sock: None)
    request = frames.Request(frames.WRITE, 1, shown.key, 0, 1, 1000).pack()
    wire.send([memoryview(request + frames.pack_table(np.array([0]), np.array([1000])) + b"some")])
    until(lambda: bytes(shown.buffer[:4]) == b"some")
    shower.withdraw(shown)
    shown.buffer[:] = 7
    with contextlib.suppress(Exception):
        wire.send([memoryview(b"x" * 996)])
    until(lambda: not shower._sessions)
    assert (shown.buffer == 7).all()
    wire.close()


def answer(number: int, total: int, statuses: bytes, operation: int = frames.READ) -> bytes:
    return frames.pack_response(frames.Request(operation, number, 0, 0, len(statuses), total), total) + statuses


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\0" * 200,
        answer(2, 100, b"\0") + b"x" * 100 + b"\0",
        answer(1, 99, b"\0") + b"x" * 100 + b"\0",
        answer(1, 100, b"\x09") + b"x" * 100 + b"\0",
        answer(1, 100, b"\0") + b"x" * 50,
        answer(1, 100, b"\0") + b"x" * 100 + b"\x63",
    ],
    ids=["nothing", "zeros", "another-number", "another-total", "no-status", "cut-short", "no-last-status"],
)
def test_a_peer_that_lies_in_its_answer(asker: TcpEndpoint, said: bytes) -> None:
    def script(sock: socket.socket) -> None:
        sock.recv(1000)
        sock.sendall(said)

    whole_buffer = np.zeros(300, np.uint8)
    local = asker.expose(whole_buffer[100:200])
    with scripted(script) as address:
        remote = batch.RegionDescriptor(address, 5, 100, 0)
        assert kinds(asker.read(local, remote, whole(100), deadline_s=PATIENCE_S)) == {PeerLost}
    assert not whole_buffer[:100].any()
    assert not whole_buffer[200:].any()


def test_bytes_that_change_on_their_way_are_found(asker: TcpEndpoint) -> None:
    """The peer says of what arrived that it was something else than what was sent."""

    def script(sock: socket.socket) -> None:
        sock.recv(48 + 32 + 20, socket.MSG_WAITALL)
        good = xxhash.xxh3_128_digest(b"\1" * 10)
        sock.sendall(answer(1, 0, b"\0\0", frames.WRITE) + good + b"?" * 16)
        sock.recv(1)

    local = asker.expose(np.ones(100, np.uint8))
    with scripted(script) as address:
        remote = batch.RegionDescriptor(address, 5, 100, 0)
        spans = Spans.of([(0, 0, 10), (10, 10, 10)])
        results = asker.write(local, remote, spans, checksums=True).result(PATIENCE_S)
        assert {index: type(error) for index, error in results.errors.items()} == {1: BlockCorrupt}
        assert results.checksums == (xxhash.xxh3_128_digest(b"\1" * 10), b"")
        asker.close()


def test_a_connection_that_breaks_is_replaced(asker: TcpEndpoint) -> None:
    def give(sock: socket.socket, number: int) -> None:
        sock.recv(1000)
        sock.sendall(answer(number, 10, b"\0") + b"y" * 10 + b"\0")

    def cut(sock: socket.socket) -> None:
        give(sock, 1)
        sock.recv(1000)

    local = asker.expose(np.zeros(10, np.uint8))
    with scripted(cut, lambda sock: give(sock, 1)) as address:
        remote = batch.RegionDescriptor(address, 5, 100, 0)
        assert not asker.read(local, remote, whole(10)).result(PATIENCE_S).errors
        assert kinds(asker.read(local, remote, whole(10))) == {PeerLost}
        assert not asker.read(local, remote, whole(10)).result(PATIENCE_S).errors


def test_attempts_to_connect_back_off(asker: TcpEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks again and again for a peer that is gone gets his answers, at a rate that harms nobody."""
    dialled: list[float] = []
    real = Dialer.dial

    def dial(self: Dialer, *arguments: object) -> object:
        dialled.append(time.monotonic())
        return real(self, *arguments)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(Dialer, "dial", dial)
    listener = socket.create_server(("127.0.0.1", 0))
    remote = batch.RegionDescriptor(format_address(*listener.getsockname()), 5, 100, 0)
    listener.close()
    local = asker.expose(np.zeros(10, np.uint8))
    for _ in range(4):
        assert kinds(asker.read(local, remote, whole(10), deadline_s=PATIENCE_S)) == {PeerLost}
    pauses = np.diff(dialled)
    first_s, _ = peer.BACK_OFF_S
    assert (pauses >= first_s * np.array([1, 2, 4]) * 0.9).all()


@pytest.mark.usefixtures("small_parts")
def test_a_number_is_told_after_the_last_byte_of_a_large_write(asker: TcpEndpoint, shower: TcpEndpoint) -> None:
    nbytes = 20 * MIB
    shown, local = shower.expose(buffer_of(nbytes, None)), asker.expose(buffer_of(nbytes, 1))
    told: list[tuple[int, int, bool]] = []
    shower.on_notice(lambda key, number: told.append((key, number, bool((shown.buffer == local.buffer).all()))))
    spans = Spans.of((at, at, 2 * MIB) for at in range(0, nbytes, 2 * MIB))
    assert not asker.write(local, shown.descriptor(), spans, notify=9).result(PATIENCE_S).errors
    assert told == [(shown.key, 9, True)]
    told.clear()
    forged = batch.RegionDescriptor(shower.address, shown.key, 2 * nbytes, 0)
    too_far = Spans.of([(0, 0, 10), (0, nbytes - 5, 10)])
    assert set(asker.write(local, forged, too_far, notify=9).result(PATIENCE_S).errors) == {1}
    assert kinds(asker.write(local, forged, Spans.of([(0, 0, 10)]), notify=1 << 32)) == {AccessRefused}
    assert not told


def test_a_local_region_that_advances_is_left_alone(asker: TcpEndpoint, child: Peer) -> None:
    remote, local = child.expose(64 * MIB, seed=1), asker.expose(buffer_of(64 * MIB, None))
    assert not asker.read(local, remote, whole(1000)).result(PATIENCE_S).errors
    stop(child)
    read = asker.read(local, remote, whole(64 * MIB), deadline_s=PATIENCE_S)
    local.advance()
    local.buffer[:] = 7
    child.go_on()
    assert kinds(read) == {StaleRegion}
    assert (local.buffer == 7).all()


def test_what_is_written_from_a_region_that_advances_is_broken_off(asker: TcpEndpoint, child: Peer) -> None:
    """Nothing is sent in its place, and the peer is not told that it is there."""
    remote, local = child.expose(64 * MIB, seed=1), asker.expose(buffer_of(64 * MIB, 2))
    assert not asker.write(local, remote, whole(1000), notify=1).result(PATIENCE_S).errors
    stop(child)
    write = asker.write(local, remote, whole(64 * MIB), deadline_s=PATIENCE_S, notify=2)
    local.advance()
    child.go_on()
    assert kinds(write) == {StaleRegion}
    assert not asker.write(local, remote, whole(1000), notify=3).result(PATIENCE_S).errors
    assert [number for _, number in child.ask("told")] == [1, 3]
    last = 64 * MIB - 1000
    assert child.digest(remote, last) == xxhash.xxh3_128_hexdigest(pattern(64 * MIB, 1)[last:].tobytes())


def test_a_guard_that_raises_is_not_taken_for_consent(asker: TcpEndpoint, shower: TcpEndpoint) -> None:
    def guard(offset: int, nbytes: int, epoch: int) -> bool:
        raise RuntimeError("a bug")

    shown, local = shower.expose(buffer_of(100, 1), guard=guard), asker.expose(buffer_of(100, None))
    results = asker.read(local, shown.descriptor(), whole(100)).result(PATIENCE_S)
    assert list(results.errors) == [0]
    assert not local.buffer.any()
    own = asker.expose(buffer_of(100, None), guard=guard)
    assert list(asker.read(own, shown.descriptor(), whole(100)).result(PATIENCE_S).errors) == [0]


def test_given_up_while_it_waits_for_a_connection(asker: TcpEndpoint, child: Peer) -> None:
    remote, local = child.expose(100, seed=1), asker.expose(buffer_of(100, None))
    stop(child)
    reads = [asker.read(local, remote, whole(100)) for _ in range(5)]
    for read in reads:
        read.abandon()
        assert kinds(read) == {TransferCancelled}
    assert not asker.stats().in_flight_bytes
    assert not reads[0].cancel(), "the future is not its owner's to cancel: the mechanism may be at work"


def test_an_own_region_is_read_and_written_like_any_other(asker: TcpEndpoint) -> None:
    first, second = asker.expose(buffer_of(MIB, 1)), asker.expose(buffer_of(MIB, 2))
    assert not asker.read(first, second.descriptor(), whole(MIB)).result(PATIENCE_S).errors
    assert (first.buffer == pattern(MIB, 2)).all()
    stats = asker.stats()
    assert (stats.bytes_read, stats.spans, stats.errors, stats.in_flight_bytes) == (MIB, 1, 0, 0)


def test_neighbours_are_one_view() -> None:
    offsets, lengths = payload.runs(np.array([0, 10, 30, 35, 90]), np.array([10, 20, 5, 5, 1]))
    assert (offsets.tolist(), lengths.tolist()) == ([0, 90], [40, 1])
    region = Region("x:1", np.zeros(10 * MIB, np.uint8))
    spans = payload.Spans(region, 0, None, np.arange(9) * MIB, np.full(9, MIB), 9 * MIB)  # pyright: ignore
    assert [len(group.views) for group in payload.groups(spans, False)] == [1, 1]
    assert [group.nbytes for group in payload.groups(spans, False)] == [8 * MIB, MIB]
    assert sum(group.nbytes for group in payload.groups(spans, True)) == 9 * MIB


def test_parts_of_a_batch() -> None:
    region = Region("x:1", np.zeros(100 * MIB, np.uint8))
    rows = [(0, 0, 40 * MIB), (0, 0, 10), (MIB, 5, 20 * MIB), (5, 5, 5)]
    parts = Batch(
        region, region.descriptor(), Spans.of(rows), writing=False, checksums=False, notify=None, deadline=1.0
    ).waiting
    assert [(part.start, part.stop, part.total) for part in parts] == [
        (0, 1, 40 * MIB),
        (1, 2, 10),
        (2, 3, 20 * MIB),
        (3, 4, 5),
    ]


def test_what_is_left_of_views() -> None:
    views = [memoryview(b"abc"), memoryview(b"de"), memoryview(b"f")]
    for done in range(7):
        assert b"".join(after(views, done)) == b"abcdef"[done:]


def test_a_wire_is_interrupted_by_another_thread(shower: TcpEndpoint) -> None:
    wire = Dialer(SECRET, None, PATIENCE_S).dial(shower.address, lambda sock: None)
    assert isinstance(wire, PlainWire)
    ended = threading.Event()

    def receive() -> None:
        with contextlib.suppress(Exception):
            wire.receive([memoryview(bytearray(10))])
        ended.set()

    thread = threading.Thread(target=receive)
    thread.start()
    wire.interrupt()
    assert ended.wait(PATIENCE_S)
    thread.join()
    wire.close()


def test_a_peer_that_cannot_be_resolved(asker: TcpEndpoint) -> None:
    local = asker.expose(np.zeros(10, np.uint8))
    for address, kind in (("nowhere", AccessRefused), ("127.0.0.1:99999", AccessRefused), ("[::bad]:1", PeerLost)):
        remote = batch.RegionDescriptor(address, 5, 100, 0)
        assert kinds(asker.read(local, remote, whole(10), deadline_s=PATIENCE_S)) == {kind}


def test_without_threads_there_is_a_deadline_all_the_same(
    asker: TcpEndpoint, shower: TcpEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, local = shower.expose(buffer_of(100, 1)), asker.expose(buffer_of(100, None))
    assert not asker.read(local, shower.expose(buffer_of(100, 1)).descriptor(), whole(100)).result(PATIENCE_S).errors
    before, real, refused = descriptors(), threading.Thread.start, set[str]()

    def start(self: threading.Thread) -> None:
        if self.name in refused:
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    other = TcpEndpoint(SECRET)
    try:
        elsewhere = other.expose(buffer_of(100, None))
        refused = {"mcjax-tcp-ask"}
        assert kinds(other.read(elsewhere, shown.descriptor(), whole(100), deadline_s=0.1)) == {TransferTimeout}
        refused = {"mcjax-tcp-serve"}
        assert kinds(other.read(elsewhere, shown.descriptor(), whole(100), deadline_s=PATIENCE_S)) == {PeerLost}
        refused = set()
        assert (
            not other.read(elsewhere, shown.descriptor(), whole(100), deadline_s=PATIENCE_S).result(PATIENCE_S).errors
        )
    finally:
        other.close()
    until(lambda: descriptors() == before)


def test_closing_from_a_callback(child: Peer) -> None:
    """On the endpoint's own thread: it must not wait for itself."""
    asker = TcpEndpoint(SECRET)
    remote, local = child.expose(100, seed=1), asker.expose(buffer_of(100, None))
    closed = threading.Event()
    read = asker.read(local, remote, whole(100))
    read.add_done_callback(lambda _: (asker.close(), closed.set()))
    assert closed.wait(PATIENCE_S)
