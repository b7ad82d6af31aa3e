"""Host memory to files and back: direct I/O by a bounded pool of threads, durable before it is answered.

Each slot in a file is a header and a payload behind it, written by one call; neighbouring slots go by one call too.
Threads in `preadv` keep as many requests at the disk as `io_uring` would (docs/transfer.md has the figures), and need
nothing that is not in every kernel.
"""

from __future__ import annotations

import errno
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from mcjax.errors import BlockCorrupt, ConfigError, StaleRegion, TierUnavailable, TransferError, Unencodable
from mcjax.transfer.base import Copy, CopyResult, Memory, TransportStats
from mcjax.transfer.transports.disk import PAGE_BYTES, Disk, Health, ShortFile, whole
from mcjax.transfer.transports.file_parts import (
    Bounce,
    FileMemory,
    Job,
    Part,
    Task,
    file_side,
    have_read,
    job_of,
    parts_of,
    to_read,
    to_write,
)
from mcjax.transfer.transports.threaded import Batch, ThreadedTransport, failure, stale
from mcjax.types import NS_PER_S, NullRecorder, Recorder


@dataclass(slots=True)
class FileStats(TransportStats):
    """Counters of a `FileTransport`."""

    refused: int = 0
    """Copies that were not tried, since their device was unavailable."""
    device_failures: int = 0
    """Operations that failed, or took longer than the deadline."""
    syncs: int = 0
    unavailable: tuple[str, ...] = ()
    """What is not asked now, as "memory: reads" or "memory: writes"."""


class FileTransport(ThreadedTransport):
    """Moves blocks between host memory and a `FileMemory`, in either direction.

    A write takes what was staged for its slots as their headers, compares checksums on the way, and is answered when
    all is durable; writes that wait together are synced together. Threads start with the first batch; `close` ends
    them, after the batches already submitted.
    """

    def __init__(
        self,
        recorder: Recorder | None = None,
        name: str = "file",
        threads: int = 4,
        deadline_s: float = 10.0,
        failures: int = 3,
        backoff_s: float = 1.0,
        most_backoff_s: float = 60.0,
        disk: Disk | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ):
        """Args:
        threads: that read and write at a time.
        deadline_s: a device that takes longer for one operation has failed it.
        failures: in a row, after which its copies are refused at once.
        backoff_s: until it is tried again, the first time; it doubles up to `most_backoff_s`.
        disk: makes the system calls.
        now_ns: the clock that the deadline and the backoff are measured by.
        """
        super().__init__(name, recorder or NullRecorder())
        for key, value in (("threads", threads), ("failures", failures)):
            if value < 1:
                raise ConfigError(f"{name}.{key}", value, "must be at least 1")
        self._stats: FileStats = FileStats()
        self._disk = disk or Disk()
        self._now_ns = now_ns
        self._patience = (failures, *(round(seconds * NS_PER_S) for seconds in (deadline_s, backoff_s, most_backoff_s)))
        self._health: dict[str, tuple[Health, Health]] = {}
        """Of each memory in files: how reading goes, and how writing does. A full disk can still be read."""
        self._threads = threads
        self._parts: queue.SimpleQueue[Part | None] = queue.SimpleQueue()
        self._written: list[Task] = []
        self._syncing = False
        self._lock = threading.Lock()
        self._workers: list[threading.Thread] = []
        self._closed = False

    def reaches(self, source: Memory, target: Memory) -> bool:
        """Both are registered; one lies in files, and the other has host bytes."""
        if not (self.knows(source) and self.knows(target)):
            return False
        host, files = (target, source) if source.name in self._health else (source, target)
        return files.name in self._health and host.buffer() is not None

    def register(self, memory: Memory) -> None:
        super().register(memory)
        if isinstance(memory, FileMemory):
            self._health.setdefault(memory.name, (Health(*self._patience), Health(*self._patience)))

    def deregister(self, memory: Memory) -> None:
        if self.knows(memory):
            self._health.pop(memory.name, None)
        super().deregister(memory)

    def stats(self) -> FileStats:
        """Counters as of the last answer that reached the loop; `unavailable` as of now."""
        now_ns = self._now_ns()
        stats = self._stats
        stats.device_failures = sum(health.failures for both in self._health.values() for health in both)
        stats.unavailable = tuple(
            f"{name}: {what}"
            for name, both in self._health.items()
            for what, health in zip(("reads", "writes"), both)
            if not health.available(now_ns)
        )
        return stats

    def close(self) -> None:
        """Finish what was submitted, then end the threads. Further batches raise `RuntimeError`."""
        self._closed = True
        for _ in self._workers:
            self._parts.put(None)
        for thread in self._workers:
            thread.join()
        self._workers.clear()

    def _check(self, copy: Copy) -> CopyResult | None:
        refused = super()._check(copy)
        if refused is not None:
            return refused
        memory, writes = file_side(copy)
        reason = self._health[memory.name][writes].refuses(self._now_ns())
        if not reason:
            return None
        self._stats.refused += 1
        return failure(copy, f"{memory.name} is unavailable: {reason}", TierUnavailable)

    def _start(self, batch: Batch) -> None:
        if self._closed:
            raise RuntimeError(f"transport {self.name} is closed")
        if not self._workers:
            self._begin()
        batch.results = [refused or CopyResult() for refused in batch.refused]
        task = Task(batch)
        parts: list[Part] = []
        for index, copy in enumerate(batch.copies):
            if batch.refused[index] is None and copy.source.slots:
                memory, writes = file_side(copy)
                job = job_of(task, index, self._health[memory.name][writes])
                mine = list(parts_of(job))
                job.parts = len(mine)
                task.left += 1
                parts += mine
        if not parts:
            self._answer(batch)
        for part in parts:
            self._parts.put(part)

    def _begin(self) -> None:
        for number in range(self._threads):
            thread = threading.Thread(target=self._work, name=f"mcjax-{self.name}-{number}", daemon=True)
            thread.start()
            self._workers.append(thread)

    # On the worker threads

    def _work(self) -> None:
        bounce = Bounce()
        while (part := self._parts.get()) is not None:
            job = part.job
            error = job.error or self._move(part, bounce)
            with self._lock:
                job.error = job.error or error
                job.parts -= 1
                ended = job.parts == 0
            if ended:
                self._end(job)

    def _move(self, part: Part, bounce: Bounce) -> TransferError | None:
        job = part.job
        copy, memory, health = job.copy, job.memory, job.health
        if job.task.batch.handle.cancelled:
            return failure(copy, "cancelled before it began").error
        changed = stale(copy)
        if changed:
            return failure(copy, f"{changed} changed hands before the copy", StaleRegion).error
        if health.failures > job.failures and not health.available(self._now_ns()):
            # It was fine when this was submitted. A queue must not wait for a failing device one by one.
            return failure(copy, f"{memory.name} is unavailable: {health.reason}", TierUnavailable).error
        try:
            if job.writes:
                views = to_write(part, bounce)
                write = self._disk.write
                health.ask(lambda: whole(write, part.file, views, part.offset), self._now_ns, well=False)
            else:
                self._read(part, bounce)
        except Unencodable as problem:  # whose block it was is known here
            return failure(copy, problem.problem, Unencodable).error
        except TransferError as problem:
            return problem
        except ShortFile as problem:
            kind = TierUnavailable if job.writes else BlockCorrupt  # what should lie there does not
            return failure(copy, f"a file of {memory.name} is too short: {problem}", kind).error
        except OSError as problem:
            if job.writes and problem.errno == errno.EIO:
                for _, slot, _ in part.slots:
                    memory.suspect(slot)
            return failure(copy, f"{memory.name}: {problem.strerror or problem}", TierUnavailable).error
        except Exception as problem:  # whatever went wrong must reach whoever waits, as a typed error
            return failure(copy, f"{type(problem).__name__}: {problem}").error
        return None

    def _read(self, part: Part, bounce: Bounce) -> None:
        try:
            views = to_read(part, bounce)
            part.job.health.ask(lambda: whole(self._disk.read, part.file, views, part.offset), self._now_ns)
            have_read(part, bounce)
        except OSError as problem:
            compared = part.job.copy.checksum and all(part.job.memory.summed(slot) for _, slot, _ in part.slots)
            if problem.errno != errno.EIO or not compared:
                raise
            self._read_apart(part, bounce)

    def _read_apart(self, part: Part, bounce: Bounce) -> None:
        """Something in there cannot be read. A disk that can read on is sound: what is lost is a block, which so has no
        checksum, and whoever compares drops that one alone. Else the failing disk's `OSError` is raised."""
        health, lost = part.job.health, False
        for one in part.each():
            views = to_read(one, bounce)
            try:
                health.ask(
                    lambda one=one, views=views: whole(self._disk.read, one.file, views, one.offset), self._now_ns
                )
            except OSError as problem:
                if problem.errno != errno.EIO:
                    raise
                lost = True
            else:
                have_read(one, bounce)
        if lost:
            elsewhere = [bounce.room(PAGE_BYTES)[:PAGE_BYTES]]
            health.ask(lambda: whole(self._disk.read, part.file, elsewhere, 0), self._now_ns)

    def _end(self, job: Job) -> None:
        """A copy's last part is done."""
        copy, task = job.copy, job.task
        changed = "" if job.error else stale(copy)
        if changed:
            problem = f"{changed} changed hands during the copy; what arrived must not be used"
            result = failure(copy, problem, StaleRegion)
        elif job.error:
            result = CopyResult(job.error)
        else:
            result = CopyResult(None, tuple(job.checksums), tuple(job.converted)) if copy.checksum else CopyResult()
        with self._lock:
            task.batch.results[job.index] = result
            if job.writes and result.error is None:
                task.written.update((job.memory.place(slot)[0], job.health) for slot in copy.target.slots)
            task.left -= 1
            ended = task.left == 0
            if ended and task.written:
                self._written.append(task)
        if ended and task.written:
            self._sync()
        elif ended:
            self._answer(task.batch)

    def _sync(self) -> None:
        """Sync what was written, and what others write meanwhile; where another thread is at it, that one does."""
        while True:
            with self._lock:
                if self._syncing or not self._written:
                    return
                tasks, self._written, self._syncing = self._written, [], True
            failed = self._sync_files({file: health for task in tasks for file, health in task.written.items()})
            for task in tasks:
                if failed:
                    _not_durable(task, failed)
                self._answer(task.batch)
            with self._lock:
                self._syncing = False

    def _sync_files(self, files: dict[int, Health]) -> dict[int, str]:
        """Sync each file once; returns what went wrong with which."""
        failed: dict[int, str] = {}
        for file, health in files.items():
            try:
                health.ask(lambda file=file: self._disk.sync(file), self._now_ns)
                self._stats.syncs += 1
            except OSError as problem:
                failed[file] = problem.strerror or str(problem)
        return failed


def _not_durable(task: Task, failed: dict[int, str]) -> None:
    batch = task.batch
    for index, copy in enumerate(batch.copies):
        if batch.results[index].error is not None:
            continue
        memory, writes = file_side(copy)
        if not writes:
            continue
        lost = [failed[file] for slot in copy.target.slots if (file := memory.place(slot)[0]) in failed]
        if lost:
            batch.results[index] = failure(copy, f"{memory.name} cannot make it durable: {lost[0]}", TierUnavailable)
