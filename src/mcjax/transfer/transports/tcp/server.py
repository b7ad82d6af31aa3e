"""The side whose memory is read and written: one frame after the other from a wire, each held against the regions
before a byte is touched and again before it is answered."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np

from mcjax.transfer.transports.endpoint import Notice
from mcjax.transfer.transports.tcp import payload
from mcjax.transfer.transports.tcp.frames import (
    CHECKSUM_BYTES,
    READ,
    REQUEST,
    SPAN_BYTES,
    FrameError,
    Request,
    Status,
    all_ok,
    pack_response,
    parse_table,
)
from mcjax.transfer.transports.tcp.payload import Spans, Sums
from mcjax.transfer.transports.tcp.regions import Regions, User
from mcjax.transfer.transports.tcp.wire import SMALL_BYTES, Disconnected, Stalled, Wire

LOG = logging.getLogger(__name__)


class FrameServer:
    """Serves frames from the regions of one endpoint. Thread-safe: a wire has one thread, there are many wires."""

    def __init__(self, regions: Regions):
        self.notice: Notice | None = None
        self.refused = 0
        """Spans that peers wrongly asked for, and peers that were no peers."""
        self._regions = regions
        self._counting = threading.Lock()

    def count_refused(self, spans: int) -> None:
        with self._counting:
            self.refused += spans

    def serve(self, wire: Wire, user: User) -> None:
        """One frame. Raises `FrameError`, `Disconnected` and `Stalled`: the wire is then of no use any more."""
        # Every request has a span: its head and its first row are received in one call.
        head = bytearray(REQUEST.size + SPAN_BYTES)
        wire.receive([memoryview(head)], idle=True)
        request = Request.parse(head[: REQUEST.size])
        table = head[REQUEST.size :]
        if request.count > 1:
            rows = bytearray((request.count - 1) * SPAN_BYTES)
            wire.receive([memoryview(rows)])
            table += rows
        offsets, nbytes = parse_table(table, request)
        region = self._regions.find(request.key)
        if region is None:
            self.count_refused(request.count)
            self._unknown(wire, request)
            return
        statuses = region.judge(request.epoch, offsets, nbytes, writing=request.operation != READ)
        if not all_ok(statuses):
            self.count_refused(request.count - statuses.count(Status.OK))
        spans = Spans(region, request.epoch, user, offsets, nbytes, request.total)
        if request.operation == READ:
            self._read(wire, request, spans, statuses)
        else:
            self._write(wire, request, spans, statuses)

    def _unknown(self, wire: Wire, request: Request) -> None:
        statuses = bytes([Status.UNKNOWN]) * request.count
        if request.operation == READ:
            wire.send([memoryview(pack_response(request, 0) + statuses * 2)])
        else:
            payload.drain(wire, request.total)
            digests = bytes(CHECKSUM_BYTES * request.count if request.checksums else 0)
            wire.send([memoryview(pack_response(request, 0) + statuses + digests)])

    def _read(self, wire: Wire, request: Request, asked: Spans, statuses: bytes) -> None:
        """Answer: statuses, the payload of those that are OK, and the statuses as they are after it."""
        spans = asked if all_ok(statuses) else asked.only(np.frombuffer(statuses, np.uint8) == Status.OK)
        head = pack_response(request, spans.total) + statuses
        if spans.total <= SMALL_BYTES:
            head += payload.gather(spans) or bytes(spans.total)
        else:
            payload.answer(wire, spans, memoryview(head))
            head = b""
        after = asked.region.judge_again(request.epoch, asked.offsets, asked.nbytes, statuses)
        wire.send([memoryview(head + after)])

    def _write(self, wire: Wire, request: Request, asked: Spans, statuses: bytes) -> None:
        """Take the payload; answer: statuses after it, and a checksum each if asked for (zeros for the refused)."""
        digests = [bytes(CHECKSUM_BYTES)] * request.count if request.checksums else []
        start = 0
        for status, same in itertools.groupby(statuses):
            stop = start + sum(1 for _ in same)
            spans = asked if stop - start == request.count else asked.only(slice(start, stop))
            if status != Status.OK:
                payload.drain(wire, spans.total)
            else:
                sums = Sums(spans.nbytes) if request.checksums else None
                payload.receive(wire, spans, sums=sums)
                if sums is not None:
                    digests[start:stop] = [digest or bytes(CHECKSUM_BYTES) for digest in sums.digests]
            start = stop
        statuses = asked.region.judge_again(request.epoch, asked.offsets, asked.nbytes, statuses)
        if request.notify is not None and all_ok(statuses):
            self._tell(request.key, request.notify)
        wire.send([memoryview(pack_response(request, 0) + statuses + b"".join(digests))])

    def _tell(self, key: int, number: int) -> None:
        """What goes wrong there is not the writer's business."""
        try:
            if self.notice is not None:
                self.notice(key, number)
        except Exception:
            LOG.exception("on_notice raised for number %d", number)


class Serves(Protocol):
    """What a session needs of its server."""

    def serve(self, wire: Wire, user: User) -> None:
        """One frame. Raises `FrameError`, `Disconnected` and `Stalled`: the wire is then of no use any more."""
        ...

    def count_refused(self, spans: int) -> None: ...


class Session:
    """One accepted connection and the thread that serves it. `on_end` is called by that thread, last."""

    def __init__(self, wire: Wire, server: Serves, on_end: Callable[[Session], object], kind: str = "tcp"):
        self._wire = wire
        self._server = server
        self._on_end = on_end
        self._thread = threading.Thread(target=self._run, name=f"mcjax-{kind}-serve", daemon=True)

    def start(self) -> None:
        """Raises `RuntimeError` if there can be no thread; the wire is closed then."""
        try:
            self._thread.start()
        except RuntimeError:
            self._wire.close()
            raise

    def interrupt(self) -> None:
        self._wire.interrupt()

    def join(self) -> None:
        """From a notice of its own: it ends when that returns."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                self._server.serve(self._wire, self)
        except (Disconnected, Stalled):
            pass
        except FrameError as problem:
            LOG.warning("a peer is not talked to any more: %s", problem)
            self._server.count_refused(1)
        finally:
            self._wire.close()
            self._on_end(self)
