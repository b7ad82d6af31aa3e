"""Frames that nobody should send, by the million: byte by byte mutated, or well formed and full of lies. Each is held
against a second account of what a frame may do (`tcp_model`), with canaries around every region."""

from __future__ import annotations

import random
import socket
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tcp_model import HEAD_BYTES, REGION_BYTES, Arena, MemoryWire, Place, frame

from mcjax.errors import HandshakeRefused, PeerLost, TransferError
from mcjax.transfer.transports.endpoint import RegionDescriptor, Spans
from mcjax.transfer.transports.secret import Secret
from mcjax.transfer.transports.tcp import TcpEndpoint
from mcjax.transfer.transports.tcp.batch import Batch, Part
from mcjax.transfer.transports.tcp.dial import Dialer, parse_address
from mcjax.transfer.transports.tcp.exchange import Exchange
from mcjax.transfer.transports.tcp.frames import FrameError
from mcjax.transfer.transports.tcp.handshake import ClientHandshake, ServerHandshake
from mcjax.transfer.transports.tcp.regions import Region
from mcjax.transfer.transports.tcp.wire import Disconnected

SECRET = Secret(b"the secret of the fuzzing")
EDGES = [0, 1, 2, 15, 16, 127, 128, 255, 4095, 4096, 4097, 65535, 65536, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 63]
EDGES += [(1 << 64) - 1, (1 << 63) - 1, (1 << 64) - 4096]
"""Numbers near which arithmetic goes wrong."""


def good_frame(chance: random.Random, places: list[Place]) -> bytes:
    """One that a peer could send to one of the regions, honest but for a span too far now and then."""
    place = chance.choice(places)
    spans = []
    for _ in range(chance.choice([1, 1, 1, 2, 3, 5])):
        nbytes = chance.randint(1, 200)
        offset = chance.randint(0, REGION_BYTES - nbytes)
        if chance.random() < 0.1:  # up to the very end, or one byte further
            offset = REGION_BYTES - nbytes + chance.choice([0, 1])
        spans.append((offset, nbytes))
    operation, number = chance.choice([1, 2]), chance.getrandbits(64)
    flags = chance.choice([0, 1]) if operation == 1 else chance.choice([0, 1, 2, 3])
    payload = chance.randbytes(sum(nbytes for _, nbytes in spans)) if operation == 2 else b""
    notice = chance.getrandbits(32) if flags & 2 else 0
    return frame(operation, place.key, place.epoch, spans, payload, flags=flags, number=number, notice=notice)


def mutated(chance: random.Random, raw: bytes, times: int) -> bytes:
    """The same, but for some bits, bytes, numbers, or pieces. More in the head and table than in what follows."""
    data = bytearray(raw)
    for _ in range(times):
        if not data:
            break
        at = chance.randrange(min(len(data), 80 if chance.random() < 0.8 else len(data)))
        match chance.randrange(8):
            case 0 | 1:
                data[at] ^= 1 << chance.randrange(8)
            case 2:
                data[at] = chance.randrange(256)
            case 3 | 4:  # a whole number, where one is
                at -= at % 4
                size = chance.choice([4, 8])
                value = (chance.choice(EDGES) + chance.choice([0, 0, 1, -1])) % (1 << 8 * size)
                data[at : at + size] = value.to_bytes(size, "little")
            case 5:
                del data[at : at + chance.randint(1, 16)]
            case 6:
                data[at:at] = chance.randbytes(chance.randint(1, 16))
            case _:
                other = chance.randrange(len(data))
                data[at : at + 8] = data[other : other + 8]
    return bytes(data)


def storm(seed: int, frames: int) -> Arena:
    """So many mutated frames, some of them one behind the other; now and then a good one has to be served as ever."""
    chance, arena = random.Random(seed), Arena.make(seed)
    done = 0
    while done < frames:
        pieces = [
            mutated(chance, good_frame(chance, arena.places), chance.choice([0, 1, 1, 1, 2, 3, 6]))
            for _ in range(chance.choice([1, 1, 1, 2, 3]))
        ]
        arena.feed(b"".join(pieces))
        done += len(pieces)
    good = arena.places[0]
    arena.feed(frame(2, good.key, good.epoch, [(5, 3)], b"abc", flags=3, notice=77))
    assert arena.told == [(good.key, 77)]
    assert arena.buffer[good.start + 5 : good.start + 8].tobytes() == b"abc"
    return arena


def test_mutated_frames_do_no_harm() -> None:
    assert storm(1, 18_000).server.refused > 1000


@pytest.mark.check_long
@pytest.mark.parametrize("seed", range(100, 110))
def test_a_million_mutated_frames_do_no_harm(seed: int) -> None:
    assert storm(seed, 100_000).server.refused > 1000


number = st.sampled_from([value - (1 << 64) if value >= 1 << 63 else value for value in EDGES]) | st.integers(-5, 5000)
"""Of 64 bits with sign."""


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_well_formed_lies_do_no_harm(data: st.DataObject) -> None:
    """Frames whose structure is right and whose numbers are anything."""
    arena = Arena.make(1)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(arena.places))
        operation = data.draw(st.sampled_from([1, 2]))
        spans = data.draw(st.lists(st.tuples(number, number | st.integers(1, 50)), min_size=1, max_size=4))
        honest = sum(nbytes for _, nbytes in spans) % (1 << 64)
        arena.feed(
            frame(
                operation,
                data.draw(st.just(place.key) | st.integers(0, (1 << 64) - 1)),
                data.draw(st.just(place.epoch) | st.integers(0, 4) | st.just((1 << 64) - 1)),
                spans,
                data.draw(st.binary(max_size=200)) + bytes(min(honest, 20_000)),
                flags=data.draw(st.integers(0, 3)),
                count=data.draw(st.just(len(spans)) | st.sampled_from([0, 1, 3, 65536, 65537, (1 << 32) - 1])),
                total=data.draw(st.just(honest) | number.map(lambda value: value % (1 << 64))),
            )
        )


class Asked:
    """A client's part that has been sent, and the memory around its local region."""

    def __init__(self, seed: int, writing: bool, checksums: bool):
        self.buffer = np.random.default_rng(seed).integers(0, 256, 3 * REGION_BYTES, np.uint8)
        local = Region("x:1", self.buffer[REGION_BYTES : 2 * REGION_BYTES])
        remote = RegionDescriptor("x:1", 5, REGION_BYTES, 0)
        self.rows = [(100, 0, 10), (110, 50, 20), (500, 9, 1), (2000, 7, 900)]
        spans = Spans.of(self.rows)
        batch = Batch(local, remote, spans, writing=writing, checksums=checksums, notify=None, deadline=1e18)
        self.part: Part = batch.begin(self)
        self.exchange = Exchange(self.part, number=3)

    def interrupt(self, part: Part, why: TransferError) -> None:
        raise AssertionError

    def elsewhere(self) -> np.ndarray:
        """All bytes but those that were asked for."""
        rest = self.buffer.copy()
        for local, _, nbytes in self.rows:
            rest[REGION_BYTES + local : REGION_BYTES + local + nbytes] = 0
        return rest


def answers_storm(seed: int, frames: int) -> tuple[int, int]:
    """Mutated answers to a client's requests: how many it took for answers, and how many it did not."""
    chance = random.Random(seed)
    taken = refused = 0
    for _ in range(frames):
        writing, checksums = chance.random() < 0.3, chance.random() < 0.3
        asked = Asked(seed, writing, checksums)
        before = asked.buffer.copy() if writing else asked.elsewhere()
        statuses = bytes(chance.choice([0, 0, 0, 0, 1, 2, 6]) for _ in asked.rows)
        delivered = [row[2] for row, status in zip(asked.rows, statuses, strict=True) if not status]
        total = 0 if writing else sum(delivered)
        head = struct.pack("<IBBHQIIQ", 0x584A434D, 0x82 if writing else 0x81, 0, 0, 3, len(asked.rows), 0, total)
        rest = bytes(16 * len(asked.rows) if checksums else 0) if writing else chance.randbytes(total) + statuses
        wire = MemoryWire(mutated(chance, head + statuses + rest, chance.choice([0, 1, 1, 2, 4])))
        try:
            asked.exchange.receive(wire)
            taken += 1
        except (FrameError, Disconnected):
            refused += 1
        assert not wire.sent
        assert np.array_equal(asked.buffer if writing else asked.elsewhere(), before)
        assert all(isinstance(error, TransferError) for error in asked.part.errors.values())
    return taken, refused


def test_mutated_answers_touch_nothing_that_was_not_asked_for() -> None:
    taken, refused = answers_storm(2, 2000)
    assert taken > 250
    assert refused > 250


@pytest.mark.check_long
def test_many_mutated_answers() -> None:
    answers_storm(3, 30_000)


def test_mutated_handshakes_open_nothing() -> None:
    chance = random.Random(4)
    for _ in range(1500):
        server, client = ServerHandshake(SECRET), ClientHandshake(SECRET)
        hello = mutated(chance, client.hello, chance.choice([0, 1, 2]))[: server.wanted]
        answer, problem = server.feed(hello)
        if problem is not None or not answer:
            continue
        proof = client.prove(answer)
        sent = mutated(chance, proof, chance.choice([0, 1]))[: server.wanted]
        answer, problem = server.feed(sent)
        if not answer:
            continue
        assert (problem is None) == (sent == proof and hello == client.hello)
        if problem is None:
            client.conclude(answer)
        else:
            with pytest.raises(HandshakeRefused):
                client.conclude(answer)


@settings(max_examples=200, deadline=None)
@given(chunks=st.lists(st.binary(min_size=1, max_size=90), max_size=4))
def test_handshakes_of_anything_end(chunks: list[bytes]) -> None:
    server = ServerHandshake(SECRET)
    for chunk in chunks:
        if server.wanted:
            answer, problem = server.feed(chunk[: server.wanted])
            assert len(answer) < 100
            if problem is not None:
                break
            assert answer[:1] != b"\0" or server.wanted
    with pytest.raises((HandshakeRefused, PeerLost)):
        ClientHandshake(SECRET).conclude(b"".join(chunks).ljust(33, b"\0")[:33])


def test_mutated_frames_over_sockets_and_a_good_peer_meanwhile() -> None:
    """The same at a real endpoint: whatever comes, it goes on serving, and nobody is left behind."""
    chance = random.Random(5)
    endpoint, good = TcpEndpoint(SECRET), TcpEndpoint(SECRET)
    try:
        buffer = np.zeros(3 * REGION_BYTES, np.uint8)
        shown = endpoint.expose(buffer[REGION_BYTES : 2 * REGION_BYTES])
        local = good.expose(np.ones(REGION_BYTES, np.uint8))
        place = Place(REGION_BYTES, 0, key=shown.key)
        dialer = Dialer(SECRET, None, 5.0)
        for turn in range(120):
            if turn % 4:
                wire = dialer.dial(endpoint.address, lambda sock: None)
            else:  # and some that never shook hands
                wire = socket.create_connection(parse_address(endpoint.address))
            raw = b"".join(mutated(chance, good_frame(chance, [place]), chance.choice([1, 2, 3])) for _ in range(3))
            if isinstance(wire, socket.socket):
                wire.sendall(raw[: HEAD_BYTES * 2])
            else:
                wire.send([memoryview(raw)])
            wire.close()
            results = good.write(local, shown.descriptor(), Spans.of([(0, 0, REGION_BYTES)]), deadline_s=20).result(30)
            assert not results.errors
        assert not buffer[:REGION_BYTES].any()
        assert not buffer[2 * REGION_BYTES :].any()
    finally:
        good.close()
        endpoint.close()
