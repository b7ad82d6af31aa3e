"""Reading and writing files whole, and when a device that fails or hangs is left alone for a while."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

PAGE_BYTES = 4096
"""What direct I/O wants addresses, offsets and lengths to be multiples of."""


class Disk:
    """The three system calls that blocks on disk need. Tests put another one in its place that fails."""

    def read(self, file: int, views: Sequence[memoryview], offset: int) -> int:
        return os.preadv(file, views, offset)

    def write(self, file: int, views: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(file, views, offset)

    def sync(self, file: int) -> None:
        """What was written is durable when this returns."""
        if hasattr(os, "fdatasync"):
            os.fdatasync(file)
        else:
            os.fsync(file)


class ShortFile(OSError):
    """The file ends before what was to be read does, or takes no more bytes."""


def whole(
    call: Callable[[int, Sequence[memoryview], int], int], file: int, views: Sequence[memoryview], offset: int
) -> None:
    """Repeat `call` (a read or a write) until all `views` are done. Raises `OSError`; `ShortFile` for an early end."""
    left = list(views)
    while left:
        done = call(file, left, offset)
        if done <= 0 or (done % PAGE_BYTES and done < sum(map(len, left))):
            raise ShortFile(f"it ends at byte {offset + max(done, 0)}")
        offset += done
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if done:
            left[0] = left[0][done:]


class Health:
    """Whether a device is asked at all: it counts what went wrong in a row, and knows what has not come back.

    After `limit` failures in a row it is left alone for `backoff_ns`, then tried once a backoff, which doubles with
    each try that fails, up to `most_backoff_ns`; one success and all is well again. An operation that takes longer
    than `deadline_ns` is a failure of the device, whatever it answers in the end, and while it lasts nothing else is
    asked. Thread-safe; times are the caller's.
    """

    def __init__(self, limit: int, deadline_ns: int, backoff_ns: int, most_backoff_ns: int):
        self._limit = limit
        self._deadline_ns = deadline_ns
        self._least_ns = self._backoff_ns = backoff_ns
        self._most_ns = most_backoff_ns
        self._lock = threading.Lock()
        self._running: dict[int, int] = {}
        self._next = 0
        self._in_a_row = 0
        self._again_ns = 0
        self.failures = 0
        """Operations that failed or were late, since the beginning."""
        self.reason = ""
        """What the last of them was."""

    def refuses(self, now_ns: int) -> str:
        """Why the device is not to be asked now; nothing if it may be. An answer of nothing may be a try."""
        with self._lock:
            hung_ns = now_ns - min(self._running.values(), default=now_ns)
            if hung_ns > self._deadline_ns:
                return f"no answer for {hung_ns / 1e9:.1f} s"
            if self._in_a_row < self._limit:
                return ""
            if now_ns < self._again_ns:
                return self.reason
            self._again_ns = now_ns + self._backoff_ns
            return ""

    def available(self, now_ns: int) -> bool:
        """Whether it is asked now for more than a try."""
        with self._lock:
            hung = now_ns - min(self._running.values(), default=now_ns) > self._deadline_ns
            return not hung and self._in_a_row < self._limit

    def begin(self, now_ns: int) -> int:
        """An operation begins; returns its number."""
        with self._lock:
            self._next += 1
            self._running[self._next] = now_ns
            return self._next

    def end(self, number: int, now_ns: int, problem: str = "", well: bool = True) -> None:
        """It has ended, and well if there is no `problem`; unless that does not yet say that the device is `well`, as
        of a write that must still be made durable."""
        with self._lock:
            took_ns = now_ns - self._running.pop(number)
            if took_ns > self._deadline_ns and not problem:
                problem = f"an answer took {took_ns / 1e9:.1f} s"
            if not problem:
                if well:
                    self._in_a_row = 0
                    self._backoff_ns = self._least_ns
                return
            self.failures += 1
            self.reason = problem
            self._in_a_row += 1
            if self._in_a_row == self._limit:
                self._again_ns = now_ns + self._backoff_ns
            elif self._in_a_row > self._limit:
                self._backoff_ns = min(self._most_ns, 2 * self._backoff_ns)
                self._again_ns = now_ns + self._backoff_ns

    def ask(self, operation: Callable[[], None], now_ns: Callable[[], int], well: bool = True) -> None:
        """Do an operation of the device, and see how that goes. Raises what it raises; a file that ends too soon is no
        failure of the device."""
        number = self.begin(now_ns())
        problem = ""
        try:
            operation()
        except ShortFile:
            raise
        except OSError as error:
            problem = error.strerror or str(error)
            raise
        finally:
            self.end(number, now_ns(), problem, well)
