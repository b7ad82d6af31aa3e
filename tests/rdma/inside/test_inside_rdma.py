"""What only verbs have: requests in chains, queue pairs that break and are replaced, keys that the card refuses.

In the guest only. A card is told wrong things by changing what this side believes of a region; it refuses by itself.
"""

from __future__ import annotations

import json
import mmap
import random
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from endpoint_peer import Peer, buffer_of, pattern, slab_of  # pyright: ignore[reportMissingImports]

from mcjax.errors import (
    AccessRefused,
    ConfigError,
    PeerLost,
    StaleRegion,
    TransferCancelled,
    TransferError,
    TransferTimeout,
    TransportUnavailable,
)
from mcjax.transfer.transports.endpoint import RegionDescriptor, Spans
from mcjax.transfer.transports.rdma import RdmaEndpoint
from mcjax.transfer.transports.rdma.greeting import KIND
from mcjax.transfer.transports.rdma.incoming import Incoming
from mcjax.transfer.transports.rdma.library import device_names, load
from mcjax.transfer.transports.rdma.memory import Region
from mcjax.transfer.transports.rdma.outgoing import Outgoing
from mcjax.transfer.transports.secret import Secret
from mcjax.transfer.transports.tcp.handshake import HELLO, VERDICT_BYTES, ClientHandshake

SECRET = Secret(b"a secret for the guest")
NBYTES = 1 << 18
WAIT_S = 60


@pytest.fixture
def near() -> Iterator[RdmaEndpoint]:
    endpoint = RdmaEndpoint(SECRET)
    yield endpoint
    endpoint.close()


@pytest.fixture
def far() -> Iterator[RdmaEndpoint]:
    endpoint = RdmaEndpoint(SECRET)
    yield endpoint
    endpoint.close()


@pytest.fixture
def local(near: RdmaEndpoint) -> Region:
    return near.expose(buffer_of(NBYTES, None))  # pyright: ignore[reportReturnType]


@pytest.fixture
def remote(far: RdmaEndpoint) -> Region:
    return far.expose(buffer_of(NBYTES, 1))  # pyright: ignore[reportReturnType]


def rows(count: int, nbytes: int = 512) -> Spans:
    """Spans that meet on neither side, and lie the other way round there."""
    return Spans.of((index * 2 * nbytes, (count - 1 - index) * 2 * nbytes, nbytes) for index in range(count))


def read(near: RdmaEndpoint, local: Region, shown: RegionDescriptor, spans: Spans) -> dict[int, str]:
    results = near.read(local, shown, spans).result(WAIT_S)
    return {index: type(error).__name__ for index, error in results.errors.items()}


def arrived(local: Region, remote: Region, spans: Spans) -> bool:
    spots = zip(spans.local, spans.remote, spans.nbytes, strict=True)
    return all((local.buffer[a : a + n] == remote.buffer[b : b + n]).all() for a, b, n in spots)


def on_thread(endpoint: RdmaEndpoint, peer: RdmaEndpoint, do: Callable[[Outgoing], object]) -> None:
    """Have the endpoint's own thread do something with its connection to the peer."""
    endpoint._loop.start(lambda: do(endpoint._outgoing[peer.address])).result(WAIT_S)


def epoch(endpoint: RdmaEndpoint, peer: RdmaEndpoint) -> int:
    """How many queue pairs there have been."""
    return endpoint._outgoing[peer.address]._epoch


# --- the card and its addresses


def test_the_address_is_roce_v2_over_ipv4(near: RdmaEndpoint) -> None:
    gid = near._card.gid
    assert (gid.device, gid.kind) == ("rxe0", "RoCE v2")
    assert gid.value == "0000:0000:0000:0000:0000:ffff:7f00:0001"
    assert near.numa_node is None


def test_another_address_goes_too() -> None:
    """RoCE v2 over IPv6."""
    near, far = (RdmaEndpoint(SECRET, device="rxe0", gid_index=2) for _ in range(2))
    try:
        assert near._card.gid.value.endswith(":0000:0001")
        local, remote = near.expose(buffer_of(NBYTES, None)), far.expose(buffer_of(NBYTES, 1))
        assert not near.read(local, remote.descriptor(), rows(20)).result(WAIT_S).errors
        assert (local.buffer[:512] == remote.buffer[19 * 1024 : 19 * 1024 + 512]).all()
    finally:
        near.close()
        far.close()


def test_addresses_that_do_not_meet(near: RdmaEndpoint, local: Region) -> None:
    """IPv4 here and IPv6 there: that is said, and not waited for."""
    far = RdmaEndpoint(SECRET, gid_index=2)
    try:
        remote = far.expose(buffer_of(NBYTES, 1))
        results = near.read(local, remote.descriptor(), rows(2)).result(WAIT_S)
        assert {type(error) for error in results.errors.values()} <= {TransferError, PeerLost}
        assert len(results.errors) == 2
    finally:
        far.close()


@pytest.mark.parametrize("wrong", [{"device": "mlx5_0"}, {"gid_index": 900}, {"device_port": 9}])
def test_a_device_that_is_not_there(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        RdmaEndpoint(SECRET, **wrong)  # pyright: ignore[reportArgumentType]


# --- requests


def test_chains_say_once_that_they_are_done(
    near: RdmaEndpoint, far: RdmaEndpoint, local: Region, remote: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    drained = Outgoing._drained

    def counting(connection: Outgoing) -> list[object]:
        completions = drained(connection)
        seen.append(len(completions))
        return completions

    monkeypatch.setattr(Outgoing, "_drained", counting)
    spans = rows(160)
    assert not read(near, local, remote.descriptor(), spans)
    assert arrived(local, remote, spans)
    assert sum(seen) == 10  # chains of 16


def test_more_requests_than_the_queue_holds(near: RdmaEndpoint, local: Region, remote: Region) -> None:
    spans = rows(1000, 100)
    assert not read(near, local, remote.descriptor(), spans)
    assert arrived(local, remote, spans)


def test_neighbours_there_are_gathered_here(near: RdmaEndpoint, local: Region, remote: Region) -> None:
    """One request with 16 pieces, back to front; and the same for a write."""
    spans = Spans.of(((15 - index) * 4096, index * 4096, 4096) for index in range(16))
    assert not read(near, local, remote.descriptor(), spans)
    assert arrived(local, remote, spans)
    assert near._outgoing[remote.descriptor().address]._sequence == 1
    local.buffer[:] = pattern(NBYTES, 5)
    assert not near.write(local, remote.descriptor(), spans).result(WAIT_S).errors
    assert arrived(local, remote, spans)


def test_a_span_larger_than_a_message(near: RdmaEndpoint, far: RdmaEndpoint) -> None:
    nbytes = 9 << 20
    here, there = near.expose(buffer_of(nbytes, None)), far.expose(buffer_of(nbytes, 3))
    assert not near.read(here, there.descriptor(), Spans.of([(0, 0, nbytes)])).result(WAIT_S).errors
    assert (here.buffer == there.buffer).all()


@pytest.mark.parametrize("nbytes", [1, 8, 63, 64, 65, 128])
def test_small_writes_go_inline(near: RdmaEndpoint, local: Region, remote: Region, nbytes: int) -> None:
    """What is inline has left when it is posted: the key of the own region is not looked at."""
    local.buffer[:] = pattern(NBYTES, 7)
    assert not near.write(local, remote.descriptor(), Spans.of([(0, 0, 1)])).result(WAIT_S).errors
    key, local.local_key = local.local_key, local.local_key ^ 0x5500
    results = near.write(local, remote.descriptor(), Spans.of([(3, 5, nbytes)])).result(WAIT_S)
    local.local_key = key
    assert bool(results.errors) == (nbytes > 64)
    if not results.errors:
        assert (remote.buffer[5 : 5 + nbytes] == local.buffer[3 : 3 + nbytes]).all()


def test_numbers_come_with_their_region(near: RdmaEndpoint, far: RdmaEndpoint, local: Region) -> None:
    """More of them than receives are posted, for two regions in turn."""
    told: list[tuple[int, int]] = []
    enough = threading.Event()
    count = 300

    def notice(key: int, number: int) -> None:
        told.append((key, number))
        if len(told) == count:
            enough.set()

    far.on_notice(notice)
    regions = [far.expose(buffer_of(64, None)) for _ in range(2)]
    shown = [region.descriptor() for region in regions]
    sent = [near.write(local, shown[n % 2], Spans.of([(0, 0, 8)]), notify=n << 8) for n in range(count)]
    assert not any(each.result(WAIT_S).errors for each in sent)
    assert enough.wait(WAIT_S)
    assert sorted(told) == sorted((regions[n % 2].key, n << 8) for n in range(count))


# --- refusals by the card, and what comes after them


def test_a_wrong_key_is_asked_for_again(near: RdmaEndpoint, far: RdmaEndpoint, local: Region, remote: Region) -> None:
    """The card refuses; the owner finds nothing wrong, and says the right key."""
    shown, spans = remote.descriptor(), rows(40)
    assert not read(near, local, shown, spans)
    pairs = epoch(near, far)

    def lie(connection: Outgoing) -> None:
        connection.known[shown.key, shown.epoch] = replace(connection.known[shown.key, shown.epoch], key=0x55AA55)

    local.buffer[:] = 0
    on_thread(near, far, lie)
    assert not read(near, local, shown, spans)
    assert arrived(local, remote, spans)
    assert epoch(near, far) == pairs + 1


@pytest.mark.parametrize("shift", [NBYTES, NBYTES - 256, -4096])
def test_the_card_keeps_to_the_bounds(
    near: RdmaEndpoint, far: RdmaEndpoint, local: Region, remote: Region, shift: int
) -> None:
    """Whoever lies about where a region is reaches nothing beside it."""
    shown = remote.descriptor()
    assert not read(near, local, shown, rows(1))
    local.buffer[:] = 9

    def lie(connection: Outgoing) -> None:
        true = connection.known[shown.key, shown.epoch]
        connection.known[shown.key, shown.epoch] = replace(true, address=true.address + shift)

    pairs = epoch(near, far)
    on_thread(near, far, lie)
    assert not read(near, local, shown, Spans.of([(0, 0, 512)]))
    assert epoch(near, far) == pairs + 1
    assert (local.buffer[:512] == remote.buffer[:512]).all()
    assert (local.buffer[512:] == 9).all()


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers do not learn in time that what they know of a region goes no more."""
    monkeypatch.setattr(Incoming, "forget", lambda connection, key: None)


@pytest.mark.usefixtures("untold")
def test_what_changed_hands_is_refused_by_the_card(
    near: RdmaEndpoint, far: RdmaEndpoint, local: Region, remote: Region
) -> None:
    """Also where a registration for the next owner's time is there already."""
    shown = remote.descriptor()
    assert not read(near, local, shown, rows(1))
    pairs = epoch(near, far)
    remote.advance()
    remote.remote_key(1)
    local.buffer[:] = 9
    assert set(read(near, local, shown, rows(20)).values()) == {"StaleRegion"}
    assert (local.buffer == 9).all()
    assert epoch(near, far) == pairs + 1
    assert not read(near, local, remote.descriptor(), rows(20))


@pytest.mark.usefixtures("untold")
def test_what_was_withdrawn_is_refused_by_the_card(
    near: RdmaEndpoint, far: RdmaEndpoint, local: Region, remote: Region
) -> None:
    shown = remote.descriptor()
    other = far.expose(buffer_of(NBYTES, 2))
    assert not read(near, local, shown, rows(1))
    kept = dict(near._outgoing[far.address].known)
    far.withdraw(remote)
    pairs = epoch(near, far)
    local.buffer[:] = 9
    for write in (False, True):
        ask = near.write if write else near.read
        results = ask(local, shown, rows(20)).result(WAIT_S)
        assert {type(error) for error in results.errors.values()} == {AccessRefused}
        assert len(results.errors) == 20
        on_thread(near, far, lambda connection: connection.known.update(kept))
    assert epoch(near, far) == pairs + 2
    assert (local.buffer == 9).all()
    assert not read(near, local, other.descriptor(), rows(20))


def test_what_is_not_writable_is_refused_by_the_card(near: RdmaEndpoint, far: RdmaEndpoint, local: Region) -> None:
    """A region that was found for reading, and a descriptor that lies."""
    there = far.expose(buffer_of(NBYTES, 1), writable=False)
    shown = there.descriptor()
    assert not read(near, local, shown, rows(1))
    pairs = epoch(near, far)
    lies = replace(shown, writable=True)
    results = near.write(local, lies, rows(20)).result(WAIT_S)
    assert {type(error) for error in results.errors.values()} == {AccessRefused}
    assert epoch(near, far) == pairs + 1
    assert (there.buffer == pattern(NBYTES, 1)).all()


def test_a_wrong_key_of_ones_own(near: RdmaEndpoint, far: RdmaEndpoint, local: Region, remote: Region) -> None:
    assert not read(near, local, remote.descriptor(), rows(1))
    pairs = epoch(near, far)
    key, local.local_key = local.local_key, local.local_key ^ 0x5500
    local.buffer[:] = 9
    assert read(near, local, remote.descriptor(), rows(2)) == {0: "AccessRefused", 1: "AccessRefused"}
    local.local_key = key
    assert (local.buffer == 9).all()
    assert epoch(near, far) > pairs
    assert not read(near, local, remote.descriptor(), rows(2))


def test_who_is_taken_down_with_others_goes_on(
    near: RdmaEndpoint, far: RdmaEndpoint, local: Region, remote: Region
) -> None:
    """Batches of one connection share its queue pair: of several, one is refused again and again."""
    bad = near.expose(buffer_of(NBYTES, None))
    assert not read(near, local, remote.descriptor(), rows(1))
    assert isinstance(bad, Region)
    key, bad.local_key = bad.local_key, bad.local_key ^ 0x5500
    goods = [near.expose(buffer_of(NBYTES, None)) for _ in range(3)]
    spans = rows(100)
    pending = [near.read(region, remote.descriptor(), spans) for region in (goods[0], bad, goods[1], goods[2])]
    results = [each.result(WAIT_S) for each in pending]
    bad.local_key = key
    assert [bool(result.errors) for result in results] == [False, True, False, False]
    assert {type(error) for error in results[1].errors.values()} == {AccessRefused}
    for region in goods:
        assert isinstance(region, Region)
        assert arrived(region, remote, spans)


# --- deadlines and deaths


def test_what_is_late_lands_nowhere(near: RdmaEndpoint, far: RdmaEndpoint) -> None:
    """At the deadline the card still has requests: they end with their queue pair, and others are tried again."""
    nbytes = 8 << 20
    here, there = near.expose(buffer_of(nbytes, None)), far.expose(buffer_of(nbytes, 3))
    other = near.expose(buffer_of(nbytes, None))
    whole = Spans.of([(0, 0, nbytes)])
    assert not near.read(here, there.descriptor(), Spans.of([(0, 0, 8)])).result(WAIT_S).errors
    here.buffer[:] = 0
    late = near.read(here, there.descriptor(), whole, deadline_s=0.001)
    patient = near.read(other, there.descriptor(), whole)
    errors = late.result(WAIT_S).errors
    here.buffer[:] = 9
    assert not errors or isinstance(errors[0], TransferTimeout)
    assert not patient.result(WAIT_S).errors
    assert (other.buffer == there.buffer).all()
    assert not errors or (here.buffer == 9).all()


def test_a_dead_peer_is_known_by_its_card(near: RdmaEndpoint) -> None:
    """Nobody listens to the control connection, which tells it sooner: the card tries again and gives up, and then the
    owner is asked."""
    peer = Peer("rdma", SECRET)
    try:
        shown = peer.expose(NBYTES, seed=1)
        here = near.expose(buffer_of(NBYTES, None))
        assert not near.read(here, shown, rows(2)).result(WAIT_S).errors
        connection = near._outgoing[shown.address]
        near._loop.start(lambda: near._loop.forget(connection._wire.socket)).result(WAIT_S)
        peer.kill()
        results = near.read(here, shown, rows(2)).result(WAIT_S)
        assert {type(error) for error in results.errors.values()} == {PeerLost}
    finally:
        peer.close()


def test_a_peer_that_stands_still_is_read_all_the_same(near: RdmaEndpoint) -> None:
    peer = Peer("rdma", SECRET)
    try:
        shown, unknown = peer.expose(NBYTES, seed=1), peer.expose(NBYTES, seed=2)
        here = near.expose(buffer_of(NBYTES, None))
        assert not near.read(here, shown, Spans.of([(0, 0, 8)])).result(WAIT_S).errors
        peer.stop()
        assert not near.read(here, shown, Spans.of([(0, 0, NBYTES)])).result(WAIT_S).errors
        assert (here.buffer == pattern(NBYTES, 1)).all()
        results = near.read(here, unknown, Spans.of([(0, 0, 8)]), deadline_s=1.0).result(WAIT_S)
        assert isinstance(results.errors[0], TransferTimeout)
    finally:
        peer.close()


def test_faults_of_several_peers_at_once(near: RdmaEndpoint) -> None:
    """A seeded walk: each batch arrives as it should, or ends in an error of what was done to it."""
    chance = random.Random(5)
    peers = [Peer("rdma", SECRET) for _ in range(3)]
    here = [near.expose(buffer_of(NBYTES, None)) for _ in peers]
    spans = Spans.of((start, start, 1 << 14) for start in range(0, NBYTES, 1 << 14))
    allowed = {
        "advance": {StaleRegion},
        "withdraw": {AccessRefused},
        "kill": {PeerLost},
        "late": {TransferTimeout},
        "abandon": {TransferCancelled},
        "nothing": set[type[TransferError]](),
    }
    try:
        for turn in range(25):
            shown = [peer.expose(NBYTES, seed=turn) for peer in peers]
            whats = [chance.choice(sorted(allowed)) for _ in peers]
            waits_s = [chance.choice([0.001, 0.02]) if what == "late" else WAIT_S for what in whats]
            pending = [
                near.read(local, one, spans, deadline_s=wait_s)
                for local, one, wait_s in zip(here, shown, waits_s, strict=True)
            ]
            for number, what in enumerate(whats):
                if what == "kill":
                    peers[number].kill()
                elif what in ("advance", "withdraw"):
                    peers[number].ask(what, key=shown[number].key)
                elif what == "abandon":
                    pending[number].abandon()
            for number, what in enumerate(whats):
                errors = pending[number].result(WAIT_S).errors
                assert {type(error) for error in errors.values()} <= allowed[what], (turn, what, errors)
                right = (here[number].buffer == pattern(NBYTES, turn)).reshape(len(spans), -1).all(1)
                assert all(right[index] or index in errors for index in range(len(spans)))
                if what == "kill":
                    peers[number].close()
                    peers[number] = Peer("rdma", SECRET)
                elif what != "withdraw":
                    peers[number].ask("withdraw", key=shown[number].key)
        assert not near.stats().in_flight_bytes
    finally:
        for peer in peers:
            peer.close()


# --- memory


@pytest.mark.parametrize("make", [buffer_of, slab_of])
@pytest.mark.parametrize("misaligned_by", [0, 1, 63])
def test_any_memory_can_be_registered(
    near: RdmaEndpoint, far: RdmaEndpoint, make: Callable[..., np.ndarray], misaligned_by: int
) -> None:
    """Of NumPy, and of a node's memory file."""
    here = near.expose(make(5000, None, misaligned_by))
    there = far.expose(make(5000, 1, 63 - misaligned_by))
    assert not near.read(here, there.descriptor(), Spans.of([(1, 2, 4990)])).result(WAIT_S).errors
    assert (here.buffer[1:4991] == there.buffer[2:4992]).all()
    assert not here.buffer[0] | here.buffer[4991:].any()


def test_memory_that_may_only_be_read(near: RdmaEndpoint, far: RdmaEndpoint, local: Region) -> None:
    """A private mapping: of a shared one that may only be read, Linux 6.1 registers nothing."""
    with mmap.mmap(-1, 8192, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ) as memory:
        buffer = np.frombuffer(memory, np.uint8)
        assert not buffer.flags.writeable
        with pytest.raises(AccessRefused):
            far.expose(buffer)
        there = far.expose(buffer, writable=False)
        local.buffer[:] = 9
        assert not near.read(local, there.descriptor(), Spans.of([(0, 0, 8192)])).result(WAIT_S).errors
        assert not local.buffer[:8192].any()
        far.withdraw(there)
        del buffer, there


def test_memory_that_is_not_there_is_refused(near: RdmaEndpoint) -> None:
    with mmap.mmap(-1, 8192, prot=0) as memory:
        buffer = np.frombuffer(memory, np.uint8)
        with pytest.raises(AccessRefused, match="cannot be registered"):
            near.expose(buffer, writable=buffer.flags.writeable)
        del buffer


def resources() -> dict[str, int]:
    """How many objects of each kind the kernel holds for all processes."""
    line = subprocess.run(["rdma", "resource", "show", "rxe0"], capture_output=True, text=True, check=True).stdout
    words = line.split()[2:]
    return {name: int(count) for name, count in zip(words[::2], words[1::2], strict=True)}


def test_what_is_exposed_twice_is_registered_once(near: RdmaEndpoint) -> None:
    buffer = buffer_of(NBYTES, None)
    before = resources()["mr"]
    regions = [near.expose(buffer) for _ in range(20)]
    assert resources()["mr"] == before + 1
    for region in regions[1:]:
        near.withdraw(region)
    assert resources()["mr"] == before + 1
    near.withdraw(regions[0])
    assert resources()["mr"] == before
    assert not len(near._registrations)


def test_keys_for_peers_are_made_when_one_asks(
    near: RdmaEndpoint, far: RdmaEndpoint, local: Region, remote: Region
) -> None:
    assert remote._shown is None
    assert not read(near, local, remote.descriptor(), rows(1))
    before = resources()["mr"]
    for _ in range(5):
        remote.advance()
        with pytest.raises(StaleRegion):
            remote.remote_key(0)
        assert not read(near, local, remote.descriptor(), rows(1))
    assert resources()["mr"] == before


def test_nothing_is_left_in_the_kernel() -> None:
    before = resources()
    for _ in range(3):
        near, far = RdmaEndpoint(SECRET), RdmaEndpoint(SECRET)
        local, remote = near.expose(buffer_of(NBYTES, None)), far.expose(buffer_of(NBYTES, 1))
        assert not near.read(local, remote.descriptor(), rows(10)).result(WAIT_S).errors
        near.read(local, remote.descriptor(), rows(100))
        far.close()
        near.close()
    assert resources() == before


# --- the control connection


def framed(message: object) -> bytes:
    text = json.dumps(message).encode()
    return len(text).to_bytes(4, "big") + text


def said(connection: socket.socket) -> dict[str, object]:
    length = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")
    return json.loads(connection.recv(length, socket.MSG_WAITALL))


def let_in(address: str) -> socket.socket:
    """A connection that has proved the secret."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), WAIT_S)
    handshake = ClientHandshake(SECRET, KIND)
    connection.sendall(handshake.hello)
    connection.sendall(handshake.prove(connection.recv(HELLO.size, socket.MSG_WAITALL)))
    handshake.conclude(connection.recv(VERDICT_BYTES, socket.MSG_WAITALL))
    return connection


def test_lies_of_who_knows_the_secret_do_no_harm(
    near: RdmaEndpoint, far: RdmaEndpoint, local: Region, remote: Region
) -> None:
    """Messages with a byte or a field changed: each is answered, or ends its own connection and no other."""
    chance = random.Random(11)
    shown = remote.descriptor()
    about = {"id": 1, "key": shown.key, "nbytes": shown.nbytes, "epoch": 0, "write": False}
    assert not read(near, local, shown, rows(1))
    place = near._outgoing[shown.address]._pair.place.message()  # pyright: ignore[reportOptionalMemberAccess]
    honest = [
        {"do": "look", **about},
        {"do": "check", **about, "spans": [[0, 10], [5, 20]]},
        {"do": "digest", **about, "spans": [[0, 10], [NBYTES, 1]]},
        {"do": "pair", "epoch": 3, "place": place},
    ]
    anything = [
        -1,
        0,
        1 << 63,
        1 << 65,
        None,
        [],
        {},
        "x",
        [[0, -5]],
        [[-1, 3]],
        [[1 << 62, 1 << 62]],
        [["a", 1]],
        True,
    ]
    connection = let_in(far.address)
    answers = 0
    for _ in range(120):
        message = dict(chance.choice(honest))
        if chance.random() < 0.6:
            message[chance.choice(sorted(message))] = chance.choice(anything)
        raw = bytearray(framed(message))
        if chance.random() < 0.3:
            raw[chance.randrange(4, len(raw))] ^= 1 << chance.randrange(8)
        try:
            connection.sendall(raw)
            answer = said(connection)
        except (OSError, ValueError):
            connection.close()
            connection = let_in(far.address)
            continue
        answers += 1
        for position, kind, _why in answer.get("errors", []):  # pyright: ignore[reportGeneralTypeIssues]
            assert kind in ("access", "stale")
            assert position in (0, 1)
    connection.close()
    assert answers > 20
    assert (remote.buffer == pattern(NBYTES, 1)).all()
    assert not read(near, local, shown, rows(40))


def test_a_machine_without_a_device_is_told_so() -> None:
    """Last: the device is taken away, and made again."""
    subprocess.run(["rdma", "link", "delete", "rxe0"], check=True)
    try:
        with pytest.raises(TransportUnavailable, match=r"there is no RDMA device.*rdma link add"):
            device_names(load())
        with pytest.raises(TransportUnavailable):
            RdmaEndpoint(SECRET)
    finally:
        subprocess.run(["rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "lo"], check=True)
    RdmaEndpoint(SECRET).close()
