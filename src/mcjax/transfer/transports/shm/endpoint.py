"""An endpoint between processes of one host. A process reads what its peers have; nobody writes into another's memory.

`read` copies by itself, at once, between two looks at the owner's page of epochs. `write` asks the owner to read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import (
    AccessRefused,
    HandshakeRefused,
    PeerLost,
    StaleRegion,
    TransferCancelled,
    TransferError,
    TransferTimeout,
    TransportUnavailable,
)
from mcjax.transfer.transports.endpoint import (
    Capabilities,
    EndpointStats,
    Exposed,
    Guard,
    Notice,
    Pending,
    RegionDescriptor,
    SpanResults,
    Spans,
)
from mcjax.transfer.transports.job import Job, Use
from mcjax.transfer.transports.regions import Regions
from mcjax.transfer.transports.secret import Secret
from mcjax.transfer.transports.shm.address import name_of, new_address
from mcjax.transfer.transports.shm.attachment import Attachment, Foreign
from mcjax.transfer.transports.shm.link import Host, Link
from mcjax.transfer.transports.shm.loop import Call, Loop, Timer
from mcjax.transfer.transports.shm.serving import Serving, ShmRegion, results_of
from mcjax.transfer.transports.shm.task import Counters, Task, Watched, nothing
from mcjax.transfer.transports.shm.wire import Malformed, Message

LOG = logging.getLogger(__name__)

MOST_INLINE_SPANS = 256
LONGEST_S = 1e8
"""No deadline is later than in some years."""
LAST_EPOCH = (1 << 64) - 1
MOST_STRANGERS = 64
"""Connections that have not proved themselves yet."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """A read on its way."""

    task: Task
    job: Job
    target: Use
    remote: RegionDescriptor


class ShmEndpoint:
    """An `Endpoint` for processes of the same user on this host.

    Args:
        secret: what peers prove to one another that they know.
        threads: that copy what is not small; as many fetch what peers write.
        inline_bytes: a read of at most so many bytes is copied before `read` returns, once the region is known: a tenth
            of a millisecond, about as much CPU time as it takes to have another thread do it.
        map_files: let peers map what lies in a memory file; else all memory is read by its address.

    Raises `TransportUnavailable` on another system than Linux.
    """

    name = "shm"
    capabilities = Capabilities(notify=True, one_sided=True, views=True, other_host=False)

    def __init__(self, secret: Secret, threads: int = 2, inline_bytes: int = 1 << 20, map_files: bool = True):
        if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
            raise TransportUnavailable("shm", "it needs Linux 5.3 or newer", "use tcp")
        self.address = new_address()
        self._loop = Loop("mcjax-shm")
        self._host = Host(self.address, secret, self._loop)
        self._inline_bytes = inline_bytes
        self._map_files = map_files
        self._regions: Regions[ShmRegion] = Regions()
        self._thread_count = threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="mcjax-shm-copy")
        self._counters = Counters()
        self._serving = Serving(self._host, self._regions, threads, self._counters, self._tell)
        self._notice: Notice | None = None
        self._links: dict[str, Link] = {}
        """Those that this side opened, by address."""
        self._callers: set[Link] = set()
        self._tasks: set[Task] = set()
        self._closed = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        # An abstract name: it is gone with the process, whatever becomes of it.
        self._listener.bind(f"\0{name_of(self.address)}")
        self._listener.listen(256)
        self._listener.setblocking(False)
        self._loop.post(lambda: self._loop.watch(self._listener, self._accept))

    def expose(
        self,
        buffer: NDArray[np.uint8],
        *,
        writable: bool = True,
        guard: Guard | None = None,
        layout: Mapping[str, Any] | None = None,
    ) -> ShmRegion:
        """As `Endpoint.expose`. Peers map a buffer that lies in a sealed memory file (a slab's), as a whole file."""
        if self._closed.is_set():
            raise AccessRefused("the endpoint is closed")
        return self._regions.add(ShmRegion(self._host, self._map_files, buffer, writable, guard, layout))

    def withdraw(self, exposed: Exposed) -> None:
        if isinstance(exposed, ShmRegion):
            self._regions.withdraw(exposed)
            self._loop.post(lambda: self._forget(exposed.key))

    def read(
        self,
        local: Exposed,
        remote: RegionDescriptor,
        spans: Spans,
        *,
        deadline_s: float = 60.0,
        checksums: bool = False,
    ) -> Pending:
        """As `Endpoint.read`. A small read of a region that was read before is answered when this returns."""
        pending = Watched()
        task = Task(self._counters, pending, spans, writing=False)
        near = self._own(local, task)
        if near is None:
            return pending
        if not near.buffer.flags.writeable:
            task.fail(AccessRefused("the local buffer is read-only"))
            return pending
        job = Job(
            spans,
            time.monotonic() + deadline_s,
            checksums,
            lambda: pending.abandoned or self._closed.is_set(),
        )
        reading = _Reading(task, job, Use(near, near.epoch, writing=True, guarded=False), remote)
        link = self._links.get(remote.address)
        known = link.attachments.get(remote.key) if link is not None else None
        if known is None or known.guarded:
            self._wait(task, pending, job.deadline, lambda: self._attach(reading))
        elif len(spans) <= MOST_INLINE_SPANS and task.nbytes <= self._inline_bytes:
            self._copy(reading, known)
        else:
            self._queue(reading, known)
        return pending

    def write(
        self,
        local: Exposed,
        remote: RegionDescriptor,
        spans: Spans,
        *,
        deadline_s: float = 60.0,
        checksums: bool = False,
        notify: int | None = None,
    ) -> Pending:
        """As `Endpoint.write`: the owner of the region fetches the spans."""
        if notify is not None and not 0 <= notify < 1 << 32:
            raise ValueError(f"notify={notify}: not a number of 32 bits")
        pending = Watched()
        task = Task(self._counters, pending, spans, writing=True)
        near = self._own(local, task)
        if near is None:
            return pending
        deadline = time.monotonic() + min(deadline_s, LONGEST_S)
        head: dict[str, Any] = {
            "do": "write",
            "key": remote.key,
            "epoch": min(remote.epoch, LAST_EPOCH),
            "source": near.key,
            "source_epoch": near.epoch,
            "deadline_ns": max(0, int(deadline * 1e9)),
            "checksums": checksums,
            "notify": notify,
        }
        self._wait(task, pending, deadline, lambda: self._ask_to_fetch(task, remote, head, deadline))
        return pending

    @contextlib.contextmanager
    def view(
        self, remote: RegionDescriptor, offset: int, nbytes: int, deadline_s: float = 60.0
    ) -> Generator[NDArray[np.uint8]]:
        """The peer's bytes themselves, `[nbytes]`, read-only, for the body of a `with`; what is to last has to be
        copied. Waits for the peer if its region is not known yet.

        Raises `StaleRegion` at the end if they changed hands meanwhile: what was read is then worth nothing. Raises
        `AccessRefused` for memory that is not in a memory file, or has a guard.
        """
        attachment = self._known(remote, deadline_s)
        if attachment.mapped is None or attachment.guarded:
            raise AccessRefused("only memory in a memory file, without a guard, can be looked at in place")
        if Spans.of([(0, offset, nbytes)]).outside(nbytes, attachment.nbytes).size:
            raise AccessRefused("the view is not inside the region")
        _insist(attachment, remote.epoch)
        yield attachment.mapped[offset : offset + nbytes]
        _insist(attachment, remote.epoch)

    def on_notice(self, notice: Notice | None) -> None:
        self._notice = notice

    def stats(self) -> EndpointStats:
        return self._counters.now()

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        done = threading.Event()
        self._loop.post(lambda: self._shut(done))
        done.wait()
        self._threads.shutdown()
        self._serving.close()
        self._loop.close()
        self._regions.withdraw_all()
        self._host.state.close()

    # On the caller's thread

    def _own(self, local: Exposed, task: Task) -> ShmRegion | None:
        if self._closed.is_set():
            task.fail(TransferCancelled("the endpoint is closed"))
        elif not isinstance(local, ShmRegion) or not self._regions.knows(local):
            task.fail(AccessRefused("the local region is not one of this endpoint's"))
        else:
            return local
        return None

    def _wait(self, task: Task, pending: Watched, deadline: float, begin: Call | None = None) -> None:
        """Have the task end in time, whatever happens, and begin it on the loop's thread."""
        given_up = TransferCancelled("given up by whoever asked for it")
        late = TransferTimeout("not there by its deadline")

        def start() -> None:
            if self._closed.is_set():
                task.fail(TransferCancelled("the endpoint is closed"))
                return
            self._tasks.add(task)
            timer = self._loop.at(deadline, lambda: task.fail(late))
            pending.add_done_callback(lambda _: self._ended(task, timer))
            if begin is not None and not pending.done():
                begin()

        pending.when_abandoned = lambda: task.fail(given_up)
        if not self._loop.post(start):
            task.fail(TransferCancelled("the endpoint is closed"))

    def _ended(self, task: Task, timer: Timer) -> None:
        timer.call = None
        self._forget_task(task)

    def _forget_task(self, task: Task) -> None:
        task.pending.when_abandoned = task.pending.work = nothing
        self._tasks.discard(task)

    def _queue(self, reading: _Reading, attachment: Attachment) -> None:
        """For a thread, or for whoever asks for the result before one has begun."""
        task, pending = reading.task, reading.task.pending
        pending.work = partial(self._copy, reading, attachment)
        if len(self._tasks) < self._thread_count:
            # Its turn comes at once, and a copy watches its own deadline: no timer is set.
            self._tasks.add(task)
            pending.when_abandoned = lambda: task.fail(TransferCancelled("given up by whoever asked for it"))
            pending.add_done_callback(lambda _: self._forget_task(task))
        else:
            self._wait(task, pending, reading.job.deadline)
        self._submit(reading, attachment)

    def _submit(self, reading: _Reading, attachment: Attachment) -> None:
        try:
            self._threads.submit(self._copy, reading, attachment)
        except RuntimeError:
            reading.task.fail(TransferCancelled("the endpoint is closed"))

    def _copy(self, reading: _Reading, attachment: Attachment) -> None:
        """On any thread."""
        if not reading.task.begin():
            return
        results = reading.job.perform(reading.target, Foreign(attachment, reading.remote.epoch))
        if attachment.guarded:
            self._loop.post(lambda: self._check_after(reading, results))  # the loop outlives the threads
        else:
            reading.task.end(results)

    def _known(self, remote: RegionDescriptor, deadline_s: float) -> Attachment:
        """Raises `TransferError`."""
        link = self._links.get(remote.address)
        known = link.attachments.get(remote.key) if link is not None else None
        if known is not None:
            return known
        found: Future[Attachment | TransferError] = Future()
        deadline = time.monotonic() + deadline_s
        if not self._loop.post(lambda: self._link_to(remote.address, found.set_result, remote.key, deadline)):
            raise TransferCancelled("the endpoint is closed")
        attachment = found.result()
        if isinstance(attachment, TransferError):
            raise attachment
        return attachment

    # On the loop's thread

    def _link_to(self, address: str, then: Any, key: int, deadline: float) -> None:
        """`then` is told of the attachment, or why there is none."""
        try:
            link = self._links.get(address) or self._dial(address)
        except TransferError as problem:
            then(problem)
            return
        link.attach(key, deadline, then)

    def _dial(self, address: str) -> Link:
        if self._closed.is_set():
            raise TransferCancelled("the endpoint is closed")
        name = name_of(address)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        connection.setblocking(False)
        try:
            connection.connect(f"\0{name}")
            link = Link(self._host, connection, address, self._serving.asked, self._link_ended)
        except OSError as problem:
            connection.close()
            raise PeerLost(f"nobody listens at {address} ({problem.strerror})") from None
        except TransferError:
            connection.close()
            raise
        if link.lost is not None:
            raise link.lost
        self._links[address] = link
        return link

    def _accept(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            try:
                if sum(not link.ready for link in self._callers) >= MOST_STRANGERS:
                    raise HandshakeRefused("too many peers that have not proved themselves")
                link = Link(self._host, connection, None, self._serving.asked, self._link_ended)
            except TransferError as problem:
                LOG.warning("a connection was refused: %s", problem.problem)
                self._counters.refuse()
                connection.close()
                return
            self._callers.add(link)

    def _link_ended(self, link: Link) -> None:
        self._callers.discard(link)
        if link.address is not None and self._links.get(link.address) is link:
            del self._links[link.address]
        if isinstance(link.lost, HandshakeRefused):
            self._counters.refuse()
            LOG.warning("%s", link.lost.problem)

    def _forget(self, key: int) -> None:
        for link in [*self._callers, *self._links.values()]:
            link.tell({"do": "withdrawn", "key": key})

    def _attach(self, reading: _Reading) -> None:
        def attached(attachment: Attachment | TransferError) -> None:
            if isinstance(attachment, TransferError):
                reading.task.fail(attachment)
            elif attachment.guarded:
                self._check_before(reading, attachment)
            else:
                self._submit(reading, attachment)

        self._link_to(reading.remote.address, attached, reading.remote.key, reading.job.deadline)

    def _check_before(self, reading: _Reading, attachment: Attachment) -> None:
        def checked(answer: Message | TransferError) -> None:
            problem = _deny(reading.job.errors, answer, reading.job.spans, "before")
            if problem is not None:
                reading.task.fail(problem)
            else:
                self._submit(reading, attachment)

        self._check(reading, checked)

    def _check_after(self, reading: _Reading, results: SpanResults) -> None:
        def checked(answer: Message | TransferError) -> None:
            spans = reading.job.spans
            problem = _deny(results.errors, answer, spans, "during")
            if problem is not None:
                results.errors.update((index, problem) for index in range(len(spans)) if index not in results.errors)
            sums = (b"" if index in results.errors else digest for index, digest in enumerate(results.checksums))
            reading.task.end(SpanResults(dict(sorted(results.errors.items())), tuple(sums)))

        self._check(reading, checked)

    def _check(self, reading: _Reading, checked: Any) -> None:
        spans, remote = reading.job.spans, reading.remote
        link = self._links.get(remote.address)
        if link is None:
            checked(PeerLost("the peer has gone"))
            return
        payload = np.stack([spans.remote, spans.nbytes]).tobytes()
        head = {"do": "check", "key": remote.key, "epoch": min(remote.epoch, LAST_EPOCH)}
        link.request(head, payload, reading.job.deadline, checked)

    def _ask_to_fetch(self, task: Task, remote: RegionDescriptor, head: dict[str, Any], deadline: float) -> None:
        try:
            link = self._links.get(remote.address) or self._dial(remote.address)
        except TransferError as problem:
            task.fail(problem)
            return

        def fetched(answer: Message | TransferError) -> None:
            if isinstance(answer, TransferError):
                task.fail(answer)
                return
            try:
                results = results_of(answer, len(task.spans), head["checksums"])
            except Malformed as problem:
                task.fail(PeerLost(f"the peer does not keep to the protocol: {problem}"))
                return
            if task.begin():
                task.end(results)

        spans, pending = task.spans, task.pending
        payload = np.stack([spans.remote, spans.local, spans.nbytes]).tobytes()
        number = link.request(head, payload, deadline, fetched)

        def cancel() -> None:
            link.tell({"do": "cancel", "of": number})

        # What the owner has begun ends as it would; it is the owner that says what has not.
        pending.when_abandoned = lambda: self._loop.post(cancel)
        if pending.abandoned:
            cancel()

    def _tell(self, key: int, number: int) -> None:
        try:
            if self._notice is not None:
                self._notice(key, number)
        except Exception:
            LOG.exception("on_notice raised for number %d", number)

    def _shut(self, done: threading.Event) -> None:
        closed = TransferCancelled("the endpoint is closed")
        self._loop.forget(self._listener)
        self._listener.close()
        for link in [*self._callers, *self._links.values()]:
            link.close(closed)
        for task in list(self._tasks):
            task.fail(closed)
        done.set()


def _deny(
    errors: dict[int, TransferError], answered: Message | TransferError, spans: Spans, when: str
) -> TransferError | None:
    """Enter what the guard did not allow; what came instead of its word, if anything did."""
    if isinstance(answered, TransferError):
        return answered
    if len(answered.payload) != len(spans):
        return PeerLost("the peer does not keep to the protocol: a word for each span is missing")
    for index, allowed in enumerate(answered.payload):
        if not allowed:
            errors.setdefault(index, StaleRegion(f"the bytes changed hands {when} the copy"))
    return None


def _insist(attachment: Attachment, epoch: int) -> None:
    problem = attachment.problem(epoch)
    if problem is not None:
        raise problem
