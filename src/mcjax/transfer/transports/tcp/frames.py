"""The frames that follow the handshake: bytes to structures and back, without a socket. `docs/transfer-tcp.md` draws
them byte by byte.

A frame is believed in nothing. What does not parse ends the connection; what parses is held against the regions.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import AccessRefused, StaleRegion, TransferError

MAGIC = 0x584A434D
"""`MCJX`, at the head of every frame."""
READ, WRITE = 1, 2
ANSWER = 0x80
"""Added to the operation that is answered."""
CHECKSUMS, NOTIFY = 1, 2
"""Flags of a request."""

MOST_SPANS = 1 << 16
"""A frame; a batch of more is several frames."""
MOST_SPAN_BYTES = 1 << 40
CHECKSUM_BYTES = 16

REQUEST = struct.Struct("<IBBHQQQIIQ")
"""Magic, operation, flags, zero, number, key, epoch, count, notice, total."""
RESPONSE = struct.Struct("<IBBHQIIQ")
"""Magic, operation, zero, zero, number, count, zero, total."""
SPAN = struct.Struct("<qq")
"""Offset and length."""
SPAN_BYTES = SPAN.size


class Status(IntEnum):
    """What became of a span, one byte on the wire."""

    OK = 0
    STALE = 1
    UNKNOWN = 2
    OUTSIDE = 3
    READ_ONLY = 4
    WITHDRAWN = 5
    FAILED = 6


def error_of(status: int) -> TransferError:
    """What the requester is told. Raises `FrameError` for a number that is no status."""
    match status:
        case Status.STALE:
            return StaleRegion("the peer's region has changed hands")
        case Status.UNKNOWN:
            return AccessRefused("the peer shows no region of that key")
        case Status.OUTSIDE:
            return AccessRefused("the span is not inside the peer's region")
        case Status.READ_ONLY:
            return AccessRefused("the peer's region is not writable")
        case Status.WITHDRAWN:
            return AccessRefused("the peer has withdrawn the region")
        case Status.FAILED:
            return TransferError("the peer failed")
        case _:
            raise FrameError(f"status {status}")


class FrameError(Exception):
    """Bytes that are no frame: whoever sent them is not talked to any more."""


@dataclass(slots=True)
class Request:
    """The head of a request; its table of spans follows it, and the payload of a write follows that.

    Nobody sets a field; but one is made for every frame, and a frozen one takes several times as long.
    """

    operation: int
    number: int
    key: int
    epoch: int
    count: int
    total: int
    """Bytes of all its spans."""
    checksums: bool = False
    notify: int | None = None

    def pack(self) -> bytes:
        flags = CHECKSUMS * self.checksums | NOTIFY * (self.notify is not None)
        fields = self.number, self.key, self.epoch, self.count, self.notify or 0, self.total
        return REQUEST.pack(MAGIC, self.operation, flags, 0, *fields)

    @classmethod
    def parse(cls, head: bytes | bytearray | memoryview) -> Request:
        """From `REQUEST.size` bytes. Raises `FrameError`."""
        magic, operation, flags, zero, number, key, epoch, count, notice, total = REQUEST.unpack(head)
        if magic != MAGIC or zero or operation not in (READ, WRITE) or flags & ~(CHECKSUMS | NOTIFY):
            raise FrameError("not a request")
        if not 1 <= count <= MOST_SPANS:
            raise FrameError(f"{count} spans in a frame")
        notify = notice if flags & NOTIFY else None
        if operation == READ and notify is not None:
            raise FrameError("a read carries no number")
        return cls(operation, number, key, epoch, count, total, bool(flags & CHECKSUMS), notify)


def pack_table(offsets: NDArray[np.int64], nbytes: NDArray[np.int64]) -> bytes:
    """The table of spans, `[n]` each."""
    if len(nbytes) == 1:  # NumPy would take several times as long
        return SPAN.pack(int(offsets[0]), int(nbytes[0]))
    table = np.empty((len(nbytes), 2), "<i8")
    table[:, 0] = offsets
    table[:, 1] = nbytes
    return table.tobytes()


def parse_table(raw: bytes | bytearray, request: Request) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Offsets and lengths, `[n]` each, from `request.count * SPAN_BYTES` bytes. Offsets may be anything; lengths are
    1 to `MOST_SPAN_BYTES` each and add up to the request's total, so that the payload has one end.

    Raises `FrameError`.
    """
    table = np.frombuffer(raw, "<i8")
    offsets, nbytes = table[::2], table[1::2]
    lengths: list[int] = nbytes.tolist()
    if min(lengths) < 1 or max(lengths) > MOST_SPAN_BYTES or sum(lengths) != request.total:
        raise FrameError("lengths that cannot be, or do not add up")
    return offsets, nbytes


def pack_response(request: Request, total: int) -> bytes:
    """The head of a response with `total` bytes of payload; statuses follow it."""
    return RESPONSE.pack(MAGIC, request.operation | ANSWER, 0, 0, request.number, request.count, 0, total)


def parse_response(raw: bytes, request: Request, nbytes: NDArray[np.int64]) -> bytes:
    """The statuses, a byte each, that follow the head of the response to `request`, whose spans have `nbytes`.

    Raises `FrameError` for what is no response to it.
    """
    magic, operation, zero, zeros, number, count, more_zeros, total = RESPONSE.unpack_from(raw)
    expected = MAGIC, request.operation | ANSWER, 0, 0, request.number, request.count, 0
    if (magic, operation, zero, zeros, number, count, more_zeros) != expected:
        raise FrameError("not the response to this request")
    statuses = check_statuses(raw[RESPONSE.size :])
    delivered = request.total
    if not all_ok(statuses):
        delivered = int(nbytes[np.frombuffer(statuses, np.uint8) == Status.OK].sum())
    if total != (delivered if request.operation == READ else 0):
        raise FrameError(f"a payload of {total} bytes")
    return statuses


def check_statuses(statuses: bytes) -> bytes:
    """The same. Raises `FrameError` if there is one that no status is."""
    if max(statuses) > Status.FAILED:
        raise FrameError(f"status {max(statuses)}")
    return statuses


def all_ok(statuses: bytes) -> bool:
    return not any(statuses)
