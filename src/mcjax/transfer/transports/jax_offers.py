"""How one process gets another to offer it bytes: the control connection of `transports/jax.py`, without jax.

    reader -> owner    a read request as over TCP (`tcp/frames.py`): key, epoch, spans
    owner -> reader    an offer: a number to pull by, the address to pull from, a status a span
    reader -> owner    an acknowledgement: the number; what was offered can go

The handshake is that of `transports/tcp`, of the kind `jax`. A connection has at most one offer that was not
acknowledged; the next request, or its end, takes that back.
"""

from __future__ import annotations

import itertools
import secrets
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mcjax.transfer.transports.tcp.frames import (
    MAGIC,
    READ,
    REQUEST,
    SPAN_BYTES,
    FrameError,
    Request,
    Status,
    check_statuses,
    pack_table,
    parse_table,
)
from mcjax.transfer.transports.tcp.regions import Region, Regions, User
from mcjax.transfer.transports.tcp.wire import Wire

KIND = b"jax"
MOST_OFFER_BYTES = 64 << 20
"""One offer: it is copied, and kept until it is acknowledged."""

OFFER = struct.Struct("<IBBHQQI")
"""Magic, operation, zero, length of the address, number of the request, number to pull by, count of spans."""
OFFERED, TAKEN = 0x91, 0x12


@dataclass(frozen=True, slots=True)
class Offer:
    """The spans whose status is OK lie one behind the other in one array of bytes, to be pulled by `number`."""

    number: int
    address: str
    statuses: NDArray[np.uint8]


class OfferServer:
    """The owner's side. `offer(number, bytes)` puts up an array to be pulled; `take_back(number, taken)` is called
    once for each, when it was `taken` or nobody will take it. Thread-safe. `address`: where to pull from."""

    def __init__(
        self,
        regions: Regions,
        address: str,
        offer: Callable[[int, NDArray[np.uint8]], object],
        take_back: Callable[[int, bool], object],
    ):
        self.refused = 0
        self._regions = regions
        self._address = address.encode()
        self._offer = offer
        self._take_back = take_back
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._open: dict[User, int] = {}

    def count_refused(self, spans: int) -> None:
        with self._lock:
            self.refused += spans

    def serve(self, wire: Wire, user: User) -> None:
        """One frame. Raises `FrameError`, `Disconnected` and `Stalled`: the wire is then of no use any more."""
        head = bytearray(REQUEST.size)
        wire.receive([memoryview(head)], idle=True)
        magic, operation, _, _, _, number, *_ = REQUEST.unpack(head)
        if magic == MAGIC and operation == TAKEN:
            if self._open.get(user) != number:
                raise FrameError("acknowledges what was not offered")
            self._close(user, True)
            return
        self._close(user, False)
        request = Request.parse(head)
        if request.operation != READ or request.total > MOST_OFFER_BYTES:
            raise FrameError("only reads, and not too much at once, can be asked for")
        table = bytearray(request.count * SPAN_BYTES)
        wire.receive([memoryview(table)])
        offsets, nbytes = parse_table(table, request)
        region = self._regions.find(request.key)
        number = self.fresh_number()
        if region is None:
            statuses = np.full(request.count, Status.UNKNOWN, np.uint8)
        else:
            statuses, found = self._gather(region, user, request, offsets, nbytes)
            if len(found):
                with self._lock:
                    self._open[user] = number
                self._offer(number, found)
        self.count_refused(int(np.count_nonzero(statuses)))
        fields = MAGIC, OFFERED, 0, len(self._address), request.number, number, request.count
        wire.send([memoryview(OFFER.pack(*fields) + self._address + statuses.tobytes())])

    def gone(self, user: User) -> None:
        """The connection has ended: nobody takes what was offered to it."""
        self._close(user, False)

    def fresh_number(self) -> int:
        """Of 63 bits, never the same twice, and not to be guessed."""
        return secrets.randbits(39) << 24 | next(self._numbers) & 0xFFFFFF

    def _gather(
        self,
        region: Region,
        user: User,
        request: Request,
        offsets: NDArray[np.int64],
        nbytes: NDArray[np.int64],
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Statuses, and a copy of the bytes of those that were OK before and after it was made."""
        before = region.judge(request.epoch, offsets, nbytes, writing=False)
        served = np.frombuffer(before, np.uint8) == Status.OK
        found = np.empty(int(nbytes[served].sum()), np.uint8)
        if len(found) and region.enter(user, request.epoch, False) is Status.OK:
            try:
                at = 0
                for start, size in zip(offsets[served].tolist(), nbytes[served].tolist(), strict=True):
                    found[at : at + size] = region.buffer[start : start + size]
                    at += size
            finally:
                region.leave(user)
        after = region.judge_again(request.epoch, offsets, nbytes, before)
        statuses = np.frombuffer(after, np.uint8)
        if after == before:
            return statuses, found
        still = np.repeat(statuses[served] == Status.OK, nbytes[served])
        return statuses, found[still]

    def _close(self, user: User, taken: bool) -> None:
        with self._lock:
            number = self._open.pop(user, None)
        if number is not None:
            self._take_back(number, taken)


class OfferClient:
    """The reader's side of one connection, used by one thread."""

    def __init__(self, wire: Wire):
        self.wire = wire
        self._numbers = itertools.count(1)

    def ask(self, key: int, epoch: int, offsets: NDArray[np.int64], nbytes: NDArray[np.int64]) -> Offer:
        """Raises `FrameError`, `Disconnected`, `Stalled`."""
        request = Request(READ, next(self._numbers), key, epoch, len(nbytes), int(nbytes.sum()))
        self.wire.send([memoryview(request.pack() + pack_table(offsets, nbytes))])
        head = bytearray(OFFER.size)
        self.wire.receive([memoryview(head)])
        magic, operation, zero, address_bytes, answered, number, count = OFFER.unpack(head)
        if (magic, operation, zero, answered, count) != (MAGIC, OFFERED, 0, request.number, request.count):
            raise FrameError("not the answer to this request")
        tail = bytearray(address_bytes + count)
        self.wire.receive([memoryview(tail)])
        statuses = np.frombuffer(check_statuses(bytes(tail[address_bytes:])), np.uint8)
        return Offer(number, tail[:address_bytes].decode("ascii", "replace"), statuses)

    def acknowledge(self, offer: Offer) -> None:
        """What was offered is here."""
        self.wire.send([memoryview(REQUEST.pack(MAGIC, TAKEN, 0, 0, 0, offer.number, 0, 0, 0, 0))])
