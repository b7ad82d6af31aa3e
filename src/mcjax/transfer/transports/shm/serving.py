"""What an endpoint does for its peers: describe regions, ask guards, and fetch what they want to have written."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import AccessRefused, TransferCancelled, TransferError
from mcjax.transfer.transports.endpoint import SpanResults, Spans
from mcjax.transfer.transports.job import Job, Use
from mcjax.transfer.transports.regions import Region, Regions
from mcjax.transfer.transports.shm.attachment import Attachment, Foreign
from mcjax.transfer.transports.shm.link import Host, Link, error_of
from mcjax.transfer.transports.shm.memory import address_of, memory_file
from mcjax.transfer.transports.shm.task import Counters
from mcjax.transfer.transports.shm.wire import Malformed, Message

LOG = logging.getLogger(__name__)

INLINE_BYTES = 64 << 10
"""A write of at most so much is fetched on the thread that learns of it."""


class ShmRegion(Region):
    """A region that peers look at: its epoch is on the endpoint's page, its memory file (if it lies in one) open."""

    def __init__(self, host: Host, map_files: bool, *arguments: Any):
        super().__init__(host.address, *arguments)
        self._state = host.state
        self._file = memory_file(self.buffer) if map_files else None
        try:
            self._line, self._incarnation = host.state.take()
        except AccessRefused:
            self._close_file()
            raise

    @property
    def mapped(self) -> bool:
        """Whether peers map it; else they read it by system calls."""
        return self._file is not None

    def _publish(self) -> None:
        if self._line < 0:
            return
        if not self.withdrawn:
            self._state.set(self._line, self.epoch)
            return
        self._state.give_back(self._line)
        self._line = -1
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file[0])
            self._file = None

    def describe(self) -> tuple[dict[str, Any], list[int]]:
        """`(what a peer needs to know, descriptors to be sent and closed)`. Raises `AccessRefused`."""
        with self._changed:
            if self.withdrawn:
                raise AccessRefused("the region was withdrawn")
            about = {
                "nbytes": self.nbytes,
                "guarded": self.guard is not None,
                "line": self._line,
                "incarnation": self._incarnation,
                "address": address_of(self.buffer),
            }
            if self._file is None:
                return about, []
            return {**about, "offset": self._file[1]}, [os.dup(self._file[0])]


class Serving:
    """Answers the questions of peers. `threads` fetch; notices are told one after the other, in their order."""

    def __init__(
        self,
        host: Host,
        regions: Regions[ShmRegion],
        threads: int,
        counters: Counters,
        notice: Callable[[int, int], object],
    ):
        self._host = host
        self._regions = regions
        # Not those that this process reads with: what peers want does not hold that up.
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="mcjax-shm-fetch")
        self._notices = ThreadPoolExecutor(1, thread_name_prefix="mcjax-shm-notices")
        self._counters = counters
        self._notice = notice
        self._cancelled: dict[tuple[Link, int], bool] = {}

    def close(self) -> None:
        self._threads.shutdown()
        self._notices.shutdown(cancel_futures=True)

    def asked(self, link: Link, message: Message) -> None:
        """Something that a peer sent, on the loop's thread. Raises `Malformed`."""
        what = message.get("do", str)
        if what == "cancel":
            number = message.number("of")
            if (link, number) in self._cancelled:
                self._cancelled[link, number] = True
            return
        if what == "withdrawn":
            link.attachments.pop(message.number("key"), None)
            return
        message.number("id")
        try:
            region = self._regions.find(message.number("key"))
            if what == "attach":
                about, fds = region.describe()
                link.reply(message, about, b"", fds)
            elif what == "check":
                self._check(link, message, region)
            elif what == "write":
                self._write(link, message, region)
            else:
                raise Malformed("an unknown question")
        except TransferError as problem:
            self._counters.refuse()
            link.refuse(message, problem)

    def _check(self, link: Link, message: Message, region: ShmRegion) -> None:
        offsets, sizes = _columns(message, 2)
        epoch = message.number("epoch")

        def ask() -> None:
            allowed = bytearray(len(sizes))
            try:
                use = Use(region, epoch, writing=False, guarded=True)
                for index, span in enumerate(zip(offsets.tolist(), sizes.tolist(), strict=True)):
                    allowed[index] = use.allows(*span)
            except Exception as problem:  # the guard's own
                LOG.exception("a guard raised")
                error = TransferError(f"the guard raised {type(problem).__name__}")
                self._host.loop.post(lambda: link.refuse(message, error))
                return
            self._host.loop.post(lambda: link.reply(message, {}, bytes(allowed)))

        try:
            self._threads.submit(ask)
        except RuntimeError:
            link.refuse(message, TransferCancelled("the peer closes"))

    def _write(self, link: Link, message: Message, region: ShmRegion) -> None:
        """Fetch what the peer has: so its bytes come when this side is ready, and never later."""
        if not region.writable:
            raise AccessRefused("the region is not writable")
        spans = Spans(*_columns(message, 3))
        deadline = message.number("deadline_ns") * 1e-9
        epoch, source_epoch = message.number("epoch"), message.number("source_epoch")
        notify = message.number("notify") if message.head.get("notify") is not None else None
        number = link, message.number("id")
        self._cancelled[number] = False
        job = Job(
            spans,
            deadline,
            message.get("checksums", bool),
            lambda: link.lost is not None or self._cancelled.get(number, True),
        )

        def done(results: SpanResults | TransferError) -> None:
            self._cancelled.pop(number, None)
            if isinstance(results, TransferError):
                link.refuse(message, results)
            else:
                link.reply(message, {"errors": grouped(results.errors)}, b"".join(_sixteen(results.checksums)))

        def attached(attachment: Attachment | TransferError) -> None:
            if isinstance(attachment, TransferError):
                done(attachment)
                return
            target, source = Use(region, epoch, writing=True, guarded=True), Foreign(attachment, source_epoch)
            if region.guard is None and len(spans) <= 64 and 0 <= spans.total_bytes <= INLINE_BYTES:
                fetch(target, source)
                return
            try:
                self._threads.submit(fetch, target, source)
            except RuntimeError:
                done(TransferCancelled("the peer closes"))

        def fetch(target: Use, source: Foreign) -> None:
            results = job.perform(target, source)
            if any(isinstance(error, AccessRefused) for error in results.errors.values()):
                self._counters.refuse()
            if notify is not None and not results.errors:
                self._notices.submit(self._notice, region.key, notify)
            self._host.loop.post(lambda: done(results))

        link.attach(message.number("source"), deadline, attached)


def _columns(message: Message, count: int) -> list[NDArray[np.int64]]:
    """Spans off the wire; `outside` is asked of them before anything is done with them. Raises `Malformed`."""
    if len(message.payload) % (8 * count):
        raise Malformed("spans are cut off")
    table = np.frombuffer(message.payload, np.int64).reshape(count, -1)
    return [np.ascontiguousarray(column) for column in table]


def _sixteen(checksums: tuple[bytes, ...]) -> list[bytes]:
    return [checksum or bytes(16) for checksum in checksums]


def grouped(errors: dict[int, TransferError]) -> list[list[Any]]:
    """`[first, count, kind, problem]` of failed spans that follow one another and failed alike."""
    groups: list[list[Any]] = []
    for index, error in sorted(errors.items()):
        named = [type(error).__name__, error.problem]
        if groups and groups[-1][0] + groups[-1][1] == index and groups[-1][2:] == named:
            groups[-1][1] += 1
        else:
            groups.append([index, 1, *named])
    return groups


def results_of(message: Message, count: int, checksums: bool) -> SpanResults:
    """The inverse, of an answer for `count` spans. Raises `Malformed`."""
    errors: dict[int, TransferError] = {}
    for group in cast(list[object], message.get("errors", list)):
        match group:
            case [int(first), int(many), str(kind), str(problem)] if 0 <= first < first + many <= count:
                errors |= dict.fromkeys(range(first, first + many), error_of(kind, problem))
            case _:
                raise Malformed("errors of spans that were not asked for")
    if not checksums:
        return SpanResults(errors)
    if len(message.payload) != 16 * count:
        raise Malformed("checksums are missing")
    sums = [message.payload[at : at + 16] for at in range(0, 16 * count, 16)]
    return SpanResults(errors, tuple(b"" if index in errors else digest for index, digest in enumerate(sums)))
