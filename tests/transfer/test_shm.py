"""What is particular to shared memory: memory files looked at in place, processes of other users, and rude peers."""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance import EXAMPLES, PATIENCE_S, SECRET, SLOW, kinds_of, until
from endpoint_peer import Peer, buffer_of, pattern, peer_of, slab_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.errors import AccessRefused, HandshakeRefused, PeerLost, StaleRegion, TransportUnavailable
from mcjax.transfer.transports.endpoint import RegionDescriptor, Spans

if sys.platform != "linux":
    pytest.skip("shared memory is for Linux", allow_module_level=True)

from mcjax.transfer.transports.shm import ShmEndpoint, wire
from mcjax.transfer.transports.shm.memory import ForeignMemory, Mappings, memory_file
from mcjax.transfer.transports.shm.state import StateFile, StateView
from mcjax.transfer.transports.shm.wire import Channel, Malformed, Message

WHOLE = Spans.of([(0, 0, 100_000)])


@pytest.fixture
def endpoint() -> Iterator[ShmEndpoint]:
    endpoint = ShmEndpoint(SECRET)
    yield endpoint
    endpoint.close()


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    peer = peer_of("shm", SECRET)
    yield peer
    peer.close()


# Memory files


def test_a_slab_is_recognised_and_other_memory_is_not(endpoint: ShmEndpoint) -> None:
    assert endpoint.expose(slab_of(100_000, 1, misaligned_by=37)).mapped
    assert not endpoint.expose(buffer_of(100_000, 1)).mapped


def test_a_memory_file_can_be_kept_from_peers() -> None:
    owner, reader = ShmEndpoint(SECRET, map_files=False), ShmEndpoint(SECRET)
    try:
        exposed = owner.expose(slab_of(100_000, 1))
        assert not exposed.mapped
        local = reader.expose(buffer_of(100_000, None))
        assert not reader.read(local, exposed.descriptor(), WHOLE).result(PATIENCE_S).errors
        assert (local.buffer == exposed.buffer).all()
    finally:
        reader.close()
        owner.close()


def test_an_endpoint_reads_and_writes_its_own(endpoint: ShmEndpoint) -> None:
    """Two instances in one process need not know that they are."""
    for make in (buffer_of, slab_of):
        shown, local = endpoint.expose(make(100_000, 1)), endpoint.expose(buffer_of(100_000, None))
        assert not endpoint.read(local, shown.descriptor(), WHOLE).result(PATIENCE_S).errors
        assert (local.buffer == pattern(100_000, 1)).all()
        local.buffer[:] = 9
        assert not endpoint.write(local, shown.descriptor(), WHOLE).result(PATIENCE_S).errors
        assert (shown.buffer == 9).all()


def test_a_file_that_could_be_cut_short_is_not_mapped(endpoint: ShmEndpoint) -> None:
    """Whoever has it mapped is killed by a touch beyond its end."""
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, 8192)
    unsealed = np.frombuffer(mmap.mmap(fd, 8192), np.uint8)
    assert memory_file(unsealed) is None
    assert not endpoint.expose(unsealed).mapped
    with pytest.raises(AccessRefused):
        Mappings().attach(fd, 0, 8192)
    os.close(fd)


def test_part_of_a_memory_file_is_found_where_it_is() -> None:
    buffer = slab_of(3 << 20, 1)
    for start, nbytes in ((0, 1), (5000, 70_000), (1 << 20, 2 << 20)):
        found = memory_file(buffer[start : start + nbytes])
        assert found is not None
        fd, offset = found
        try:
            assert offset == start
            assert (Mappings().attach(fd, offset, nbytes) == buffer[start : start + nbytes]).all()
            with pytest.raises(PermissionError):
                mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)


def test_no_mapping_reaches_beyond_its_file() -> None:
    found = memory_file(slab_of(8192, 1))
    assert found is not None
    try:
        for offset, nbytes in ((0, 8193), (4096, 4097), (8192, 1), (-1, 5)):
            with pytest.raises(AccessRefused):
                Mappings().attach(found[0], offset, nbytes)
    finally:
        os.close(found[0])


def maps() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:mcjax-blocks")


def test_what_is_withdrawn_is_unmapped_at_its_peers(endpoint: ShmEndpoint, peer: Peer) -> None:
    """A pool that shrinks gets its memory back, though somebody has looked at it."""
    local, before = endpoint.expose(buffer_of(100_000, None)), maps()
    remotes = [peer.expose(100_000, seed=1, file=True) for _ in range(3)]
    for remote in remotes:
        assert not endpoint.read(local, remote, WHOLE).result(PATIENCE_S).errors
    assert maps() == before + 3
    for remote in remotes:
        peer.ask("withdraw", key=remote.key)
    until(lambda: maps() == before)


# Views


def test_a_view_is_the_peers_memory_itself(endpoint: ShmEndpoint, peer: Peer) -> None:
    remote = peer.expose(100_000, seed=1, file=True)
    with endpoint.view(remote, 1000, 5000) as view:
        assert (view == pattern(100_000, 1)[1000:6000]).all()
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
        peer.ask("poke", key=remote.key, offset=1000)
        assert view[0] == pattern(100_000, 1)[1000] ^ 0x40


def test_a_view_of_what_changed_hands_is_stale(endpoint: ShmEndpoint, peer: Peer) -> None:
    remote = peer.expose(100_000, seed=1, file=True)

    def look(meanwhile: str) -> None:
        with endpoint.view(remote, 0, 100):
            peer.ask(meanwhile, key=remote.key)

    with pytest.raises(StaleRegion):
        look("advance")
    with pytest.raises(StaleRegion):
        look("descriptor")
    remote = RegionDescriptor.from_json(peer.ask("descriptor", key=remote.key))
    look("descriptor")
    with pytest.raises(AccessRefused):
        look("withdraw")


def test_what_cannot_be_viewed(endpoint: ShmEndpoint, peer: Peer) -> None:
    def look(remote: RegionDescriptor, offset: int, nbytes: int) -> None:
        with endpoint.view(remote, offset, nbytes, deadline_s=PATIENCE_S):
            raise AssertionError("it was shown")

    with pytest.raises(AccessRefused, match="memory file"):
        look(peer.expose(1000, seed=1), 0, 10)
    with pytest.raises(AccessRefused, match="guard"):
        look(peer.expose(1000, seed=1, file=True, guarded=True), 0, 10)
    remote = peer.expose(1000, seed=1, file=True)
    for offset, nbytes in ((0, 1001), (-1, 2), (1000, 1), (0, 0), (1 << 62, 1 << 62)):
        with pytest.raises(AccessRefused, match="inside"):
            look(remote, offset, nbytes)
    with pytest.raises(PeerLost):
        look(RegionDescriptor(remote.address + "0", 1, 10, 0), 0, 1)


# Memory by address


def test_reading_by_address_says_what_is_not_there() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    memory = ForeignMemory(child.pid)
    with pytest.raises(Exception, match="not all there"):
        memory.peek(4096, 16)
    child.kill()
    child.wait()
    with pytest.raises(PeerLost):
        memory.peek(4096, 16)


def test_the_state_of_regions_says_who_is_who() -> None:
    owner = StateFile()
    fd = owner.for_reading()
    view = StateView(fd)
    os.close(fd)
    line, incarnation = owner.take()
    assert view.epoch(line, incarnation) == 0
    owner.set(line, 7)
    assert view.epoch(line, incarnation) == 7
    owner.give_back(line)
    assert view.epoch(line, incarnation) == -1
    again, newer = owner.take()
    assert again == line
    assert view.epoch(line, incarnation) == -1
    assert view.epoch(line, newer) == 0
    owner.close()


# Other users, and processes that may not be read. They run as nobody, which takes root.

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can start processes of other users")

AS_NOBODY = """
import contextlib, os, sys, threading
sys.path[:0] = {paths!r}
import numpy as np
from conformance import SECRET
from endpoint_peer import buffer_of, slab_of
from mcjax.transfer.transports.endpoint import RegionDescriptor, Spans
from mcjax.transfer.transports.shm import ShmEndpoint
# What is imported later may be out of reach: so everything is done once before.
with contextlib.closing(ShmEndpoint(SECRET)) as one, contextlib.closing(ShmEndpoint(SECRET)) as other:
    there = one.expose(buffer_of(1000, 1)).descriptor()
    assert not other.read(other.expose(slab_of(1000, None)), there, Spans.of([(0, 0, 1000)])).result(20).errors
os.setgid({user})
os.setuid({user})
endpoint = ShmEndpoint(SECRET)
if sys.argv[1] == "own":
    held = [endpoint.expose(make(1000, 1)) for make in (buffer_of, slab_of)]
    for exposed in held:
        print(exposed.descriptor().to_json(), flush=True)
    sys.stdin.read()
else:
    local = endpoint.expose(buffer_of(1000, None))
    for line in sys.stdin:
        results = endpoint.read(local, RegionDescriptor.from_json(line), Spans.of([(0, 0, 1000)])).result(20)
        error = results.errors.get(0)
        print(type(error).__name__ + " " + str(error) if error else "there", flush=True)
endpoint.close()
"""


def as_nobody(what: str, user: int = NOBODY) -> subprocess.Popen[str]:
    source = AS_NOBODY.format(user=user, paths=[str(Path(__file__).parent), *(path for path in sys.path if path)])
    return subprocess.Popen(
        [sys.executable, "-c", source, what], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    try:
        yield process
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.stdout.close()
        process.wait(PATIENCE_S)


def lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline() for _ in range(count)]


def say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line.strip() + "\n")
    process.stdin.flush()


@needs_root
def test_a_process_of_another_user_is_refused_both_ways(endpoint: ShmEndpoint) -> None:
    """Though it knows the secret."""
    mine = endpoint.expose(buffer_of(1000, 1))
    with ended(as_nobody("read")) as reader:
        say(reader, mine.descriptor().to_json())
        assert lines(reader, 1)[0].split()[0] in ("HandshakeRefused", "PeerLost")
    assert endpoint.stats().refused
    with ended(as_nobody("own")) as owner:
        theirs = RegionDescriptor.from_json(lines(owner, 1)[0])
        results = endpoint.read(mine, theirs, Spans.of([(0, 0, 1000)])).result(PATIENCE_S)
        assert kinds_of(results) == {0: HandshakeRefused}
        assert "another user" in str(results.errors[0])


@needs_root
def test_where_memory_may_not_be_read_memory_files_still_are() -> None:
    """Processes that gave up root are not to be traced by their like: what `ptrace_scope` does elsewhere."""
    with ended(as_nobody("own")) as owner, ended(as_nobody("read")) as reader:
        anonymous, file = lines(owner, 2)
        say(reader, anonymous)
        say(reader, file)
        refused, there = lines(reader, 2)
        assert refused.startswith("AccessRefused")
        assert "ptrace_scope" in refused
        assert there.strip() == "there"


# Rude peers


def dial(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(PATIENCE_S)
    connection.connect("\0" + address.rsplit(":", 1)[1])
    return connection


def record(head: object, payload: bytes = b"", last: int = 1) -> bytes:
    text = json.dumps(head).encode()
    return bytes([last]) + struct.pack("<I", len(text)) + text + payload


def heard(connection: socket.socket) -> dict[str, Any]:
    whole = connection.recv(1 << 16)
    if not whole:
        raise EOFError
    (length,) = struct.unpack_from("<I", whole, 1)
    return json.loads(whole[5 : 5 + length])


def known_peer(address: str, version: int = wire.VERSION) -> socket.socket:
    """A connection that has proved itself, and can now say what it likes."""
    connection = dial(address)
    nonce = bytes(16)
    connection.send(record({"hello": version, "nonce": nonce.hex()}))
    theirs = bytes.fromhex(heard(connection)["nonce"])
    proof = SECRET.proof(b"mcjax-shm", b"dialler", str(version).encode(), address.encode(), nonce, theirs)
    state = StateFile()
    head = record({"proof": proof.hex(), "probe": 0, "token": "00"})
    socket.send_fds(connection, [head], [state.fd])
    state.close()
    assert heard(connection)["welcome"] is True
    return connection


def closed_by_peer(connection: socket.socket) -> bool:
    """Reads on until the end."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    return True


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
NAMES = "do id to key epoch source source_epoch deadline_ns checksums notify of hello proof errors nbytes".split()


@settings(max_examples=EXAMPLES * 10, deadline=None, suppress_health_check=SLOW)
@given(data=st.data())
def test_a_peer_that_says_anything_does_no_harm(served: tuple[ShmEndpoint, Any], data: st.DataObject) -> None:
    """After it has proved itself: whatever it asks, its bytes go nowhere and others are served."""
    owner, exposed = served
    connection = known_peer(owner.address)
    head = data.draw(st.dictionaries(st.sampled_from(NAMES), anything, max_size=6))
    if data.draw(st.booleans()):
        head |= {"do": data.draw(st.sampled_from(["attach", "write", "check", "cancel", "withdrawn"])), "id": 1}
    if data.draw(st.booleans()):
        head |= {"key": exposed.key, "epoch": 0}
    payload = data.draw(
        st.binary(max_size=100) | st.sampled_from([24, 48, 800]).flatmap(lambda n: st.binary(min_size=n, max_size=n))
    )
    whole = bytearray(record(head, payload))
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.send(whole)
        connection.send(record({"do": "attach", "key": exposed.key, "id": 2}))
    connection.close()
    assert (exposed.buffer == pattern(1000, 1)).all()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ShmEndpoint, Any]]:
    owner = ShmEndpoint(SECRET)
    exposed = owner.expose(buffer_of(1000, 1))
    yield owner, exposed
    reader = ShmEndpoint(SECRET)
    local = reader.expose(buffer_of(1000, None))
    assert not reader.read(local, exposed.descriptor(), Spans.of([(0, 0, 1000)])).result(PATIENCE_S).errors
    reader.close()
    owner.close()


def test_nothing_is_done_for_who_has_not_proved_itself(served: tuple[ShmEndpoint, Any]) -> None:
    owner, exposed = served
    questions = [
        {"do": "attach", "key": exposed.key, "id": 1},
        {"hello": wire.VERSION, "nonce": "zz"},
        {"hello": wire.VERSION},
        {"hello": "1", "nonce": ""},
        {"proof": "00", "probe": 1, "token": ""},
        {"welcome": True},
        [],
    ]
    for question in questions:
        connection = dial(owner.address)
        connection.send(record(question))
        assert closed_by_peer(connection)
        connection.close()
    connection = dial(owner.address)
    connection.send(record({"hello": wire.VERSION, "nonce": bytes(16).hex()}))
    heard(connection)
    connection.send(record({"proof": bytes(32).hex(), "probe": 1, "token": "00"}))
    assert closed_by_peer(connection)
    connection.close()


def test_a_proof_serves_one_handshake_only(served: tuple[ShmEndpoint, Any]) -> None:
    """What was overheard is of no use: the listener has another nonce each time."""
    owner, _ = served
    first = dial(owner.address)
    first.send(record({"hello": wire.VERSION, "nonce": bytes(16).hex()}))
    theirs = bytes.fromhex(heard(first)["nonce"])
    version = str(wire.VERSION).encode()
    proof = SECRET.proof(b"mcjax-shm", b"dialler", version, owner.address.encode(), bytes(16), theirs)
    first.close()
    second = dial(owner.address)
    second.send(record({"hello": wire.VERSION, "nonce": bytes(16).hex()}))
    assert bytes.fromhex(heard(second)["nonce"]) != theirs
    second.send(record({"proof": proof.hex(), "probe": 1, "token": "00"}))
    assert closed_by_peer(second)
    second.close()


def test_a_message_that_never_ends_ends_the_connection(served: tuple[ShmEndpoint, Any]) -> None:
    connection = dial(served[0].address)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for _ in range(4):
            connection.send(b"\0" + bytes(2000))
    assert closed_by_peer(connection)
    connection.close()


class LyingOwner:
    """Listens as an endpoint does, proves itself, and answers what it is told to."""

    def __init__(self, answer: dict[str, Any], fds: list[int]):
        self.name = f"mcjax-{os.urandom(8).hex()}"
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:12]
        self.address = f"shm:{boot}:{self.name}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + self.name)
        self._listener.listen()
        self._answer, self._fds = answer, fds
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(PATIENCE_S)
        theirs = bytes.fromhex(heard(connection)["nonce"])
        parts = (b"listener", str(wire.VERSION).encode(), self.address.encode(), theirs, bytes(16))
        proof = SECRET.proof(b"mcjax-shm", *parts)
        connection.send(record({"hello": wire.VERSION, "nonce": bytes(16).hex(), "proof": proof.hex()}))
        _, fds, _, _ = socket.recv_fds(connection, 1 << 16, 4)
        for fd in fds:
            os.close(fd)
        state = StateFile()
        state.take()
        socket.send_fds(connection, [record({"welcome": True, "probe": 0, "token": "00"})], [state.fd])
        state.close()
        question = heard(connection)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have had enough of the first one
            socket.send_fds(connection, [record({**self._answer, "to": question["id"]})], self._fds)
            socket.send_fds(connection, [record({**self._answer, "to": question["id"]})], self._fds)
        closed_by_peer(connection)
        connection.close()

    def close(self) -> None:
        self._listener.close()
        self._thread.join(PATIENCE_S)


GOOD = {"nbytes": 1000, "guarded": False, "line": 0, "incarnation": 1, "address": 1 << 40}


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {**GOOD, "nbytes": -1},
        {**GOOD, "line": 1 << 20},
        {**GOOD, "guarded": 1},
        {**GOOD, "address": (1 << 64) - 5},
        {**GOOD, "offset": 0},
        {**GOOD, "nbytes": 1 << 40, "offset": 0},
        {**GOOD, "offset": 8000},
        {**GOOD, "offset": "0"},
        {"problem": 5, "kind": "PeerLost"},
        {"problem": "no", "kind": "SystemExit"},
        GOOD,
    ],
)
def test_an_owner_that_lies_gets_an_error_out_of_it(answer: dict[str, Any]) -> None:
    """Never a touch of memory that is not there, and nobody waits for ever."""
    fd = os.memfd_create("cut-short")
    os.ftruncate(fd, 4096)
    liar, endpoint = LyingOwner(answer, [fd]), ShmEndpoint(SECRET)
    before = len(os.listdir("/proc/self/fd"))
    try:
        local = endpoint.expose(buffer_of(1000, None))
        results = endpoint.read(local, RegionDescriptor(liar.address, 1, 1000, 0), Spans.of([(0, 0, 1000)]))
        assert results.result(PATIENCE_S).errors
        assert not local.buffer.any()
    finally:
        endpoint.close()
        liar.close()
        os.close(fd)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < before


# Messages


@settings(max_examples=EXAMPLES * 4, deadline=None)
@given(
    messages=st.lists(
        st.tuples(st.dictionaries(st.text(max_size=9), anything, max_size=4), st.binary(max_size=200), st.booleans()),
        max_size=5,
    )
)
def test_messages_arrive_as_they_were_sent(messages: list[tuple[dict[str, Any], bytes, bool]]) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender, receiver = Channel(here), Channel(there)
    receiver.largest_bytes = wire.LARGEST_BYTES
    got: list[Message] = []
    for head, payload, long in messages:
        sender.send(head, payload * (300 if long else 1), [os.open("/dev/null", os.O_RDONLY)] if long else None)
        while sender.unsent:
            got += receiver.receive()
            sender.flush()
    got += receiver.receive()
    assert [(message.head, message.payload) for message in got] == [
        (json.loads(json.dumps(head)), payload * (300 if long else 1)) for head, payload, long in messages
    ]
    for message, (_, _, long) in zip(got, messages, strict=True):
        assert len(message.fds) == long
        message.close_fds()
    sender.close()
    assert not receiver.receive()
    assert isinstance(receiver.ended, EOFError)
    receiver.close()


def test_a_peer_that_does_not_read_is_given_up() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender = Channel(here)
    for _ in range(wire.LARGEST_BYTES >> 20):
        sender.send({}, bytes(1 << 20))
        if sender.unsent_bytes + (2 << 20) > wire.LARGEST_BYTES:
            break
    with pytest.raises(BrokenPipeError, match="does not read"):
        sender.send({}, bytes(2 << 20))
    sender.close()
    there.close()


def test_numbers_off_the_wire_are_of_their_kind() -> None:
    message = Message({"yes": True, "small": 3, "large": 1 << 64, "below": -1, "text": "3"})
    assert message.number("small") == 3
    for name in ("yes", "large", "below", "text", "absent"):
        with pytest.raises(Malformed):
            message.number(name)


def test_elsewhere_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(TransportUnavailable, match="use tcp"):
        ShmEndpoint(SECRET)


def test_what_the_page_shows_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "transfer-shm.md").read_text(encoding="utf-8")
    exec(page.split("```python\n")[1].split("```")[0], {"__name__": "page"})
    assert capsys.readouterr().out == "{} [244 245 246]\n"
