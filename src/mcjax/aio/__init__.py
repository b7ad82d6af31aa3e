"""Time and waiting, the same in every world.

Procedures take time only from here. A *clock* belongs to the running event loop: `backends.virtual.VirtualLoop` is its
own clock; on a stock loop `WallClock` keeps an ordered timer heap on one stock timer. On both, the world is a sequence
of *wake-ups* (a timer, or a mechanism's answer) in order of (time, sequence); before the next wake-up is looked at,
everything that the last one made runnable has run, and `now_ns()` stands still meanwhile. So a run is a function of its
wake-ups, and a real run whose wake-ups were logged can be repeated in virtual time, decision by decision.
"""

from mcjax.aio.bucket import TokenBucket
from mcjax.aio.clock import Clock, Timer, WallClock, clock, enter, new_future, now_ns, start_of_run
from mcjax.aio.tasks import Scope, settle, spawn, unless
from mcjax.aio.waiting import Deadlines, Signal, WaitQueue, first_of, sleep_ns, sleep_until_ns, within

__all__ = [
    "Clock",
    "Deadlines",
    "Scope",
    "Signal",
    "Timer",
    "TokenBucket",
    "WaitQueue",
    "WallClock",
    "clock",
    "enter",
    "first_of",
    "new_future",
    "now_ns",
    "settle",
    "sleep_ns",
    "sleep_until_ns",
    "spawn",
    "start_of_run",
    "unless",
    "within",
]
