"""What a frame may do, said a second time and another way: plain loops over plain integers, for the fuzzing of the
server; and the memory it is tried on, between canaries."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from mcjax.transfer.transports.tcp.frames import FrameError
from mcjax.transfer.transports.tcp.regions import Region, Regions
from mcjax.transfer.transports.tcp.server import FrameServer
from mcjax.transfer.transports.tcp.wire import Disconnected, Wire

HEAD = "<IBBHQQQIIQ"
HEAD_BYTES = struct.calcsize(HEAD)
MAGIC = int.from_bytes(b"MCJX", "little")
REGION_BYTES, CANARY_BYTES = 4096, 2048
FORBIDDEN = range(1000, 2000)
"""Offsets for which the guarded region's guard says no."""


class MemoryWire(Wire):
    """A connection whose other side has sent `received` and then gone away."""

    def __init__(self, received: bytes):
        self.sent: list[bytes] = []
        self._received = memoryview(received)

    def send(self, views: Sequence[memoryview], more: bool = False) -> None:
        self.sent += map(bytes, views)

    def receive(self, views: Sequence[memoryview], idle: bool = False) -> None:
        for view in views:
            if len(view) > len(self._received):
                raise Disconnected
            view[:] = self._received[: len(view)]
            self._received = self._received[len(view) :]


class Nobody:
    """The user of a region that is never stuck in it."""

    def interrupt(self) -> None:
        raise AssertionError("there is nothing to interrupt")


@dataclass
class Place:
    """One region of the arena: where it begins, and what may be done to it."""

    start: int
    epoch: int
    writable: bool = True
    guarded: bool = False
    key: int = 0


@dataclass
class Arena:
    """Four regions in one buffer, canaries around them, a server that shows them, and what has to be in the buffer."""

    buffer: np.ndarray
    places: list[Place]
    server: FrameServer
    expected: np.ndarray
    told: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def make(cls, seed: int) -> Arena:
        places = [Place(0, 0), Place(0, 0, writable=False), Place(0, 3), Place(0, 0, guarded=True)]
        stride = REGION_BYTES + CANARY_BYTES
        buffer = np.random.default_rng(seed).integers(0, 256, CANARY_BYTES + stride * len(places), np.uint8)
        regions = Regions()
        for number, place in enumerate(places):
            place.start = CANARY_BYTES + number * stride
            guard = (lambda offset, nbytes, epoch: not meets(offset, nbytes)) if place.guarded else None
            shown = buffer[place.start : place.start + REGION_BYTES]
            region = regions.add(Region("x:1", shown, writable=place.writable, guard=guard))
            for _ in range(place.epoch):
                region.advance()
            place.key = region.key
        arena = cls(buffer, places, FrameServer(regions), buffer.copy())
        arena.server.notice = lambda key, number: arena.told.append((key, number))
        return arena

    def feed(self, received: bytes) -> None:
        """Have the server serve all of it, and hold what it did against `serve`."""
        wire, nobody = MemoryWire(received), Nobody()
        self.told.clear()
        try:
            while True:
                self.server.serve(wire, nobody)
        except (FrameError, Disconnected):
            pass
        answers, notices, open_ends = self.serve(received)
        sent, at = b"".join(wire.sent), 0
        for answer in answers:
            if isinstance(answer, bytes):
                assert sent[at : at + len(answer)] == answer
            at += len(answer)
        assert len(sent) == at, f"{len(sent)} bytes were answered instead of {at}"
        assert self.told == notices
        for start, stop in open_ends:  # of a payload that was cut short: some of it may have landed, or none
            self.expected[start:stop] = self.buffer[start:stop]
        assert np.array_equal(self.buffer, self.expected), "bytes that are not what they should be"

    def serve(self, received: bytes) -> tuple[list[bytes | range], list[tuple[int, int]], list[tuple[int, int]]]:
        """What has to be answered (a range: so many bytes, which may be anything) and told, and which bytes (`start,
        stop` in the buffer) may have changed or not; `expected` changes as the buffer has to."""
        answers: list[bytes | range] = []
        notices = []
        while len(received) >= HEAD_BYTES:
            magic, operation, flags, zero, number, key, epoch, count, notice, total = struct.unpack_from(HEAD, received)
            sums, notify = flags & 1, flags & 2
            if magic != MAGIC or zero or operation not in (1, 2) or flags > 3 or not 1 <= count <= 65536:
                break
            if operation == 1 and notify:
                break
            end = HEAD_BYTES + 16 * count
            if len(received) < end:
                break
            spans = list(struct.iter_unpack("<qq", received[HEAD_BYTES:end]))
            if any(not 1 <= nbytes <= 1 << 40 for _, nbytes in spans) or sum(nbytes for _, nbytes in spans) != total:
                break
            received = received[end:]
            place = next((place for place in self.places if place.key == key), None)
            before = bytes(verdict(place, operation == 2, epoch, *span) for span in spans)
            head = struct.pack("<IBBHQI", MAGIC, operation | 0x80, 0, 0, number, count) + bytes(4)
            if operation == 1:
                payload = b""
                for status, (offset, nbytes) in zip(before, spans, strict=True):
                    if place is not None and not status:
                        payload += self.expected[place.start + offset :][:nbytes].tobytes()
                answers.append(head + struct.pack("<Q", len(payload)) + before + payload + before)
                continue
            digests, at = b"", 0
            if len(received) < total:
                landing = [span for span, status in zip(spans, before, strict=True) if not status]
                start = 0 if place is None else place.start
                return answers, notices, [(start + offset, start + offset + nbytes) for offset, nbytes in landing]
            for status, (offset, nbytes) in zip(before, spans, strict=True):
                payload = received[at : at + nbytes]
                at += nbytes
                if place is None or status:
                    digests += bytes(16)
                    continue
                self.expected[place.start + offset :][:nbytes] = np.frombuffer(payload, np.uint8)
                digests += xxhash.xxh3_128_digest(payload)
            received = received[total:]
            if notify and not any(before):
                notices.append((key, notice))
            answers.append(head + bytes(8) + before)
            if sums:  # of spans that overwrite one another, it may be of either
                apart = not overlap([span for span, status in zip(spans, before, strict=True) if not status])
                answers.append(digests if apart else range(len(digests)))
        return answers, notices, []


def overlap(spans: list[tuple[int, int]]) -> bool:
    ordered = sorted(spans)
    return any(offset + nbytes > after for (offset, nbytes), (after, _) in itertools.pairwise(ordered))


def meets(offset: int, nbytes: int) -> bool:
    """Whether some of the bytes are forbidden."""
    return offset < FORBIDDEN.stop and offset + nbytes > FORBIDDEN.start


def verdict(place: Place | None, writing: bool, epoch: int, offset: int, nbytes: int) -> int:
    """The status of a span: see `docs/transfer-tcp.md`."""
    if place is None:
        return 2
    if offset < 0 or offset + nbytes > REGION_BYTES:
        return 3
    if epoch < place.epoch or (epoch > place.epoch and not place.guarded):
        return 1
    if writing and not place.writable:
        return 4
    return 1 if place.guarded and meets(offset, nbytes) else 0


def frame(
    operation: int,
    key: int,
    epoch: int,
    spans: Sequence[tuple[int, int]],
    payload: bytes = b"",
    *,
    flags: int = 0,
    number: int = 1,
    notice: int = 0,
    count: int | None = None,
    total: int | None = None,
    magic: int = MAGIC,
    zero: int = 0,
) -> bytes:
    """A request, which may lie: `spans` are offsets and lengths of 64 bits, taken as they are."""
    count = len(spans) if count is None else count
    total = sum(nbytes for _, nbytes in spans) if total is None else total
    head = struct.pack(HEAD, magic, operation, flags, zero, number, key, epoch, count, notice, total)
    return head + b"".join(struct.pack("<qq", *span) for span in spans) + payload
