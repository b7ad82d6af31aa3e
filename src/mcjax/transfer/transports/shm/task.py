"""A batch from the call to its answer: waiting, then at work, then answered, once."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mcjax.errors import TransferError
from mcjax.transfer.transports.endpoint import EndpointStats, Pending, SpanResults, Spans
from mcjax.transfer.transports.job import answer


def nothing() -> None:
    """There is nothing to do."""


class Watched(Pending):
    """Tells at once that it was given up. Who waits for it, for as long as it takes, does the `work` if no other thread
    has begun it."""

    def __init__(self) -> None:
        super().__init__()
        self.when_abandoned: Callable[[], object] = nothing
        self.work: Callable[[], object] = nothing

    def abandon(self) -> None:
        super().abandon()
        self.when_abandoned()

    def result(self, timeout: float | None = None) -> SpanResults:
        if timeout is None:
            self.work()
        return super().result(timeout)


class Counters:
    """The statistics of an endpoint, counted by many threads."""

    def __init__(self) -> None:
        self._stats = EndpointStats()
        self._lock = threading.Lock()

    def begin(self, nbytes: int) -> None:
        with self._lock:
            self._stats.in_flight_bytes += nbytes

    def end(self, spans: Spans, nbytes: int, results: SpanResults, writing: bool) -> None:
        arrived = nbytes - sum(int(spans.nbytes[index]) for index in results.errors)
        stats = self._stats
        with self._lock:
            stats.in_flight_bytes -= nbytes
            stats.spans += len(spans)
            stats.errors += len(results.errors)
            if writing:
                stats.bytes_written += arrived
            else:
                stats.bytes_read += arrived

    def refuse(self) -> None:
        with self._lock:
            self._stats.refused += 1

    def now(self) -> EndpointStats:
        with self._lock:
            stats = self._stats
            return EndpointStats(*(getattr(stats, name) for name in EndpointStats.__slots__))


class Task:
    """One batch. Any thread may end it; the first one does."""

    def __init__(self, counters: Counters, pending: Watched, spans: Spans, writing: bool):
        self.pending = pending
        self.spans = spans
        self._counters = counters
        self._writing = writing
        self.nbytes = spans.total_bytes
        self._state = "waiting"
        self._lock = threading.Lock()
        counters.begin(self.nbytes)

    def begin(self) -> bool:
        """Take it to work; False if it has been answered meanwhile. From then on only `end` answers it."""
        return self._go("waiting", "working")

    def fail(self, error: TransferError) -> None:
        """Answer it as a whole, unless it is at work."""
        if self._go("waiting", "answered"):
            error = error.with_traceback(None)
            self._answer(SpanResults(dict.fromkeys(range(len(self.spans)), error), (b"",) * len(self.spans)))

    def end(self, results: SpanResults) -> None:
        if self._go("working", "answered"):
            self._answer(results)

    def _go(self, before: str, after: str) -> bool:
        with self._lock:
            if self._state != before:
                return False
            self._state = after
            return True

    def _answer(self, results: SpanResults) -> None:
        self._counters.end(self.spans, self.nbytes, results, self._writing)
        answer(self.pending, results)
