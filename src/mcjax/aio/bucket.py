"""A bound on how much passes in a time."""

from __future__ import annotations

from mcjax.aio.clock import now_ns
from mcjax.aio.waiting import sleep_until_ns

_NS_PER_S = 1_000_000_000


class TokenBucket:
    """Lets `per_s` pass a second, and `burst` at once after a pause. None: there is no bound.

    In any time t no more than `per_s * t + burst` is let through, and what was taken last.
    """

    def __init__(self, per_s: float | None, burst: float = 0.0):
        self._ns_each = None if per_s is None else _NS_PER_S / per_s
        self._burst = burst
        self._paid_ns = 0
        """When all that was taken so far has been paid for."""

    async def take(self, amount: float) -> None:
        """Wait until what was taken before is paid for; who comes first, goes first. Who gives up waiting has taken."""
        each = self._ns_each
        if each is None:
            return
        due_ns = max(self._paid_ns, now_ns() - round(self._burst * each))
        self._paid_ns = due_ns + round(amount * each)
        if due_ns > now_ns():
            await sleep_until_ns(due_ns)
