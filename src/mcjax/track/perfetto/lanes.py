"""Lanes: slices that overlap, on as few tracks as can hold them."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable


class Lanes:
    """Tracks of one name. `new_lane` makes one more when a slice fits on none of those there are.

    Slices come in order of their ends, as a log has them. Each goes to the lane that has been free for the shortest
    time, which leaves the others to slices that began earlier: no assignment in that order needs fewer.
    """

    def __init__(self, new_lane: Callable[[], int]):
        self._new_lane = new_lane
        self._free: list[tuple[int, int]] = []
        """`(end of its last slice, lane)`, in order."""

    def take(self, start_ns: int, end_ns: int) -> int:
        """The lane of a slice; from then on it is taken until `end_ns`."""
        at = bisect_right(self._free, start_ns, key=lambda lane: lane[0])
        lane = self._free.pop(at - 1)[1] if at else self._new_lane()
        insort(self._free, (max(start_ns, end_ns), lane))
        return lane
