"""One part of a batch as one frame: what is asked, what comes back, and what that means for each span."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mcjax.errors import BlockCorrupt
from mcjax.transfer.transports.tcp import payload
from mcjax.transfer.transports.tcp.batch import Part, local_error
from mcjax.transfer.transports.tcp.frames import (
    CHECKSUM_BYTES,
    READ,
    RESPONSE,
    WRITE,
    Request,
    Status,
    all_ok,
    check_statuses,
    error_of,
    pack_table,
    parse_response,
)
from mcjax.transfer.transports.tcp.payload import Spans, Sums
from mcjax.transfer.transports.tcp.wire import SMALL_BYTES, Wire

DIRECT_SPANS = 512
"""A request of so many spans fits any socket's empty buffer."""


class Exchange:
    """A part that has begun. `nothing_left`: no span of it may go, by what the local region's guard says."""

    def __init__(self, part: Part, number: int):
        batch = part.batch
        self._part = part
        self._judged = batch.local.judge(batch.epoch, part.local, part.nbytes, writing=False)
        self._indices: Sequence[int] = range(part.start, part.stop)
        near = Spans(batch.local, batch.epoch, part, part.local, part.nbytes, part.total)
        remote = part.remote
        if not all_ok(self._judged):
            good = np.frombuffer(self._judged, np.uint8) == Status.OK
            for index, status in zip(self._indices, self._judged, strict=True):
                if status != Status.OK:
                    part.errors[index] = local_error(status)
            near, remote = near.only(good), remote[good]
            self._indices, self._judged = np.flatnonzero(good).tolist(), bytes(int(good.sum()))
            self._indices = [part.start + index for index in self._indices]
        self.nothing_left = not near.total
        self._near = near
        self._request = Request(
            operation=WRITE if batch.writing else READ,
            number=number,
            key=batch.remote.key,
            epoch=batch.remote.epoch,
            count=len(near.nbytes),
            total=near.total,
            checksums=batch.checksums and batch.writing,
            notify=None if part.errors else part.notify,
        )
        self._head = self._request.pack() + pack_table(remote, near.nbytes)
        self._sums = Sums(near.nbytes) if batch.checksums else None

    def small(self) -> memoryview | None:
        """The whole of what is sent, if it is little (and anything)."""
        if self.nothing_left or self._request.count > DIRECT_SPANS:
            return None
        if self._request.operation == READ:
            return memoryview(self._head)
        if self._request.total > SMALL_BYTES:
            return None
        copied = payload.gather(self._near)
        if copied is None:
            return None
        if self._sums is not None:
            self._sums.add_whole(memoryview(copied))
        return memoryview(self._head + copied)

    def send(self, wire: Wire) -> None:
        """All of it. Raises what the wire raises, and `payload.Withheld`."""
        if self._request.operation == READ:
            wire.send([memoryview(self._head)])
        else:
            payload.request(wire, self._near, memoryview(self._head), self._sums)

    def receive(self, wire: Wire) -> None:
        """The answer; the part knows afterwards. Raises what the wire raises, and `FrameError`."""
        if self._request.operation == READ:
            self._receive_read(wire)
        else:
            self._receive_written(wire)

    def _receive_read(self, wire: Wire) -> None:
        count, near, sums = self._request.count, self._near, self._sums
        head = bytearray(RESPONSE.size + count)
        wire.receive([memoryview(head)])
        statuses = parse_response(bytes(head), self._request, near.nbytes)
        if not all_ok(statuses):
            near = near.only(np.frombuffer(statuses, np.uint8) == Status.OK)
            sums = None if sums is None else Sums(near.nbytes)
        tail = bytearray(count)
        payload.receive(wire, near, memoryview(tail), sums)
        self._conclude(check_statuses(bytes(tail)))
        if sums is not None:
            digests = iter(sums.digests)
            self._keep([next(digests) if status == Status.OK else b"" for status in statuses])

    def _receive_written(self, wire: Wire) -> None:
        count, sums = self._request.count, self._sums
        head = bytearray(RESPONSE.size + count)
        summed = bytearray(CHECKSUM_BYTES * count if sums is not None else 0)
        wire.receive([memoryview(head), memoryview(summed)] if summed else [memoryview(head)])
        self._conclude(parse_response(bytes(head), self._request, self._near.nbytes))
        if sums is None:
            return
        arrived = [bytes(summed[at : at + CHECKSUM_BYTES]) for at in range(0, len(summed), CHECKSUM_BYTES)]
        for index, sent, got in zip(self._indices, sums.digests, arrived, strict=True):
            if sent != got and index not in self._part.errors:
                self._part.errors[index] = BlockCorrupt("the bytes that arrived are not those that were sent")
        self._keep(arrived)

    def _conclude(self, statuses: bytes) -> None:
        """What the peer says of each span, and what has become of the local region meanwhile."""
        near, errors = self._near, self._part.errors
        judged = near.region.judge_again(near.epoch, near.offsets, near.nbytes, self._judged)
        if all_ok(statuses) and all_ok(judged):
            return
        for index, status, own in zip(self._indices, statuses, judged, strict=True):
            if status != Status.OK:
                errors[index] = error_of(status)
            elif own != Status.OK:
                errors[index] = local_error(own)

    def _keep(self, digests: list[bytes]) -> None:
        part = self._part
        if len(digests) == part.stop - part.start:
            part.digests = digests
            return
        part.digests = [b""] * (part.stop - part.start)
        for index, digest in zip(self._indices, digests, strict=True):
            part.digests[index - part.start] = digest
