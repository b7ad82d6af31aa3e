"""Room ahead of need, as much as the time of a save asks for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from mcjax.errors import ConfigError
from mcjax.kvpool.base import TierReading

SMOOTHING = 1 / 16
"""What a new measurement counts against all that went before."""
HITS = 64
"""The last requests, of which hits are counted."""


@dataclass
class Adaptive:
    """Keep blocks free, or saved and next to leave, so that nobody waits for saves more often than hits are worth.

    What was asked for and cannot have been saved since is the backlog: it grows by every reservation, and shrinks by a
    block in the time that one takes to save. With `s` blocks to spare, a reservation waits if it leaves a backlog above
    `s`; but what is kept to spare is not there to be found. So `s` is a quantile of the last backlogs, as of a
    newsvendor's stock: the share of reservations that may wait is what one more cached block would find for each of
    them; times a margin, since a load that grows has no such backlogs in its past. Under constant load the backlogs
    repeat themselves, and so does their quantile. It rises at once and falls slowly: who waits, waits for many blocks.
    Where nothing is below, room takes no time to make, and the tier may be full.

    `window`: reservations that are remembered. `margin`: how many times the quantile is kept to spare. `worth`: saves
    that a found block is worth, since what is not found is brought or computed at others' expense, too. `most`: what is
    kept to spare at most, as a share of the tier.
    """

    window: int = 256
    margin: float = 1.5
    worth: float = 4.0
    most: float = 0.5
    _demands: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]], init=False)
    """When the last reservations were made, and of how many blocks."""
    _asked: int = field(default=0, init=False)
    _saved: int = field(default=0, init=False)
    _busy_ns: int = field(default=0, init=False)
    _block_ns: float = field(default=0.0, init=False)
    """What a block takes of the link's time."""
    _spare: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ConfigError("kvpool.watermark.window", self.window, "must be at least 1")
        if self.margin < 1.0:
            raise ConfigError("kvpool.watermark.margin", self.margin, "must be at least 1")
        if self.worth < 0.0:
            raise ConfigError("kvpool.watermark.worth", self.worth, "must not be negative")
        if not 0.0 < self.most < 1.0:
            raise ConfigError("kvpool.watermark.most", self.most, "must be a share, above 0 and below 1")

    def levels(self, reading: TierReading) -> tuple[float, float]:
        if not reading.saves:
            return 1.0, 1.0
        self._time(reading)
        asked, self._asked = reading.asked - self._asked, reading.asked
        if asked:
            self._demands.append((reading.now_ns, asked))
            if len(self._demands) > self.window:
                self._demands.popleft()
        if not self._block_ns:  # nobody knows yet how long saves take: the first ones are made early
            level = 1.0 - self.most / 2
        else:
            if asked or self._spare is None:
                self._adapt(reading)
            level = 1.0 - (self._spare or 0.0) / reading.capacity
        return level, level

    def _time(self, reading: TierReading) -> None:
        saved, busy_ns = reading.saved - self._saved, reading.busy_ns - self._busy_ns
        if saved > 0 and busy_ns > 0:
            self._block_ns += (busy_ns / saved - self._block_ns) * (SMOOTHING if self._block_ns else 1.0)
            self._saved, self._busy_ns = reading.saved, reading.busy_ns

    def _adapt(self, reading: TierReading) -> None:
        wanted = min(self.margin * self._quantile(reading), self.most * reading.capacity)
        if self._spare is None or wanted > self._spare:
            self._spare = wanted
        else:
            self._spare += (wanted - self._spare) * SMOOTHING

    def _quantile(self, reading: TierReading) -> float:
        """The smallest backlog that so few of the last ones were above as may be."""
        if not self._demands:
            return 0.0
        backlogs, backlog, last_ns = list[float](), 0.0, 0
        for now_ns, count in self._demands:
            backlog = max(0.0, backlog - (now_ns - last_ns) / self._block_ns) + count
            backlogs.append(backlog)
            last_ns = now_ns
        backlogs.sort()
        hits = list(islice(reversed(reading.hits), HITS))
        found = min(0.99, sum(hits) / len(hits)) if hits else 0.0
        asked = sum(count for _, count in self._demands) / len(backlogs)
        may_wait = min(1.0, self.worth * found / (1.0 - found) * asked / reading.capacity)
        return backlogs[min(len(backlogs) - 1, int((1.0 - may_wait) * len(backlogs)))]
