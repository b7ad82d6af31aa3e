"""A machine whose threads share what it has: what each computes slows the others, and each does one thing at a time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np

from mcjax import aio
from mcjax.cost.measured import LASTING_NS

_FORGIVEN_NS = 1 / 1024
"""Ends are rounded up to whole nanoseconds; float rounding below this must not cost one more."""


class Work:
    """Something under way: `left_ns` of it at `since_ns`, shrinking by `rate` a nanosecond."""

    __slots__ = ("kind", "left_ns", "on_end", "rate", "since_ns", "timer")

    def __init__(self, kind: str, duration_ns: int, on_end: Callable[[], object]):
        self.kind = kind
        self.left_ns = float(duration_ns)
        self.on_end = on_end
        self.rate = 0.0
        self.since_ns = 0
        self.timer: aio.Timer | None = None


class Host:
    """Takes work of named kinds, and runs all of it side by side.

    Work of kind k takes `1 + sum(slowdown[k][other] - 1)` times its own duration while the others run: its rate is
    constant between two changes of who computes, and integrated exactly. With nobody else it takes just its duration.
    """

    def __init__(self, slowdown: Mapping[str, Mapping[str, float]], seed: int = 0):
        self._slowdown = slowdown
        self._running: dict[Work, None] = {}
        self._seed = seed
        self._rank = (-1, 0.5)

    def rank(self) -> float:
        """How slow the machine is for now, between 0 and 1 among all its times; the same for all that it does."""
        window = aio.now_ns() // LASTING_NS
        if self._rank[0] != window:
            self._rank = (window, float(np.random.default_rng([self._seed, window]).random()))
        return self._rank[1]

    def start(self, kind: str, duration_ns: int, on_end: Callable[[], object]) -> None:
        """Call `on_end` when the work is done."""
        work = Work(kind, duration_ns, on_end)
        work.since_ns = aio.now_ns()
        self._running[work] = None
        self._settle()

    def _settle(self) -> None:
        """Who computes has changed: everybody goes on at a new rate."""
        now_ns = aio.now_ns()
        for work in self._running:
            rate = 1 / self._factor(work)
            if rate == work.rate:
                continue
            work.left_ns -= (now_ns - work.since_ns) * work.rate
            work.since_ns, work.rate = now_ns, rate
            if work.timer is not None:
                work.timer.cancel()
            end_ns = now_ns + max(0, math.ceil(work.left_ns / rate - _FORGIVEN_NS))
            work.timer = aio.clock().call_at_ns(end_ns, self._end, work)

    def _factor(self, work: Work) -> float:
        slower = self._slowdown.get(work.kind)
        if slower is None:
            return 1.0
        return 1.0 + sum(slower.get(other.kind, 1.0) - 1.0 for other in self._running if other is not work)

    def _end(self, work: Work) -> None:
        del self._running[work]
        self._settle()
        work.on_end()


class Job:
    """One thing for a thread to do. `on_end` may return what the thread goes on with at once, before anything else."""

    __slots__ = ("duration_ns", "kind", "on_end")

    def __init__(self, kind: str, duration_ns: int, on_end: Callable[[], Job | None]):
        self.kind = kind
        self.duration_ns = duration_ns
        self.on_end = on_end


class HostThread:
    """Does jobs one by one, in order of submission."""

    def __init__(self, host: Host):
        self._host = host
        self._jobs: deque[Job] = deque()
        self._busy = False

    def submit(self, job: Job) -> None:
        self._jobs.append(job)
        if not self._busy:
            self._begin(self._jobs.popleft())

    def _begin(self, job: Job) -> None:
        self._busy = True
        self._host.start(job.kind, job.duration_ns, lambda: self._ended(job))

    def _ended(self, job: Job) -> None:
        following = job.on_end()
        if following is None and self._jobs:
            following = self._jobs.popleft()
        if following is None:
            self._busy = False
        else:
            self._begin(following)
