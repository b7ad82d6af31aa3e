"""Whether a path is worth trying: left alone after failures in a row, probed after a pause, back with one success."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Patience:
    """How failures of paths are answered."""

    failures: int = 3
    """So many in a row, and a path is left alone."""
    backoff_ns: int = 10_000_000
    """Before a path that failed a copy is given that copy again, and before one that is left alone is probed; twice as
    long each time."""
    most_backoff_ns: int = 5_000_000_000

    def pause_ns(self, times: int) -> int:
        """The pause after `times` (1 or more) in a row."""
        return min(self.backoff_ns << min(times - 1, 40), self.most_backoff_ns)


@dataclass(slots=True)
class Health:
    """What one path's outcomes say. Time is given, never asked for."""

    patience: Patience
    in_row: int = 0
    """Failures since the last success."""
    away_until_ns: int = 0
    _pauses: int = field(default=0)
    _probing: bool = field(default=False)

    def is_well(self) -> bool:
        return self.in_row < self.patience.failures

    def may_try(self, now_ns: int) -> bool:
        """Whether a copy may go this way: the path is well, or it is time to find out, with one copy at a time."""
        return self.in_row < self.patience.failures or (now_ns >= self.away_until_ns and not self._probing)

    def begin(self, now_ns: int) -> bool:
        """A copy goes this way. True if its end says whether the path is back: it is a probe."""
        if self.in_row < self.patience.failures or now_ns < self.away_until_ns or self._probing:
            return False
        self._probing = True
        return True

    def succeeded(self, is_probe: bool = False) -> None:
        """A copy arrived: all is well again, whichever it was."""
        self.in_row = self._pauses = 0
        if is_probe:
            self._probing = False

    def failed(self, now_ns: int, is_probe: bool = False) -> None:
        """A copy failed by the path's fault. Copies that were under way together lengthen the pause only once."""
        was_well = self.is_well()
        self.in_row += 1
        if is_probe:
            self._probing = False
        if is_probe or (was_well and not self.is_well()):
            self._pauses += 1
            self.away_until_ns = now_ns + self.patience.pause_ns(self._pauses)

    def undecided(self, is_probe: bool) -> None:
        """A copy ended and says nothing of the path: given up, or refused for what it was."""
        if is_probe:
            self._probing = False
