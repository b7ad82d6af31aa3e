"""What a copy takes on a path, learned from what copies took: a line through recent outcomes, the older the lighter."""

from __future__ import annotations

DECAY = 0.95
"""What one more outcome leaves of the weight of those before: about the last twenty count."""

_FLAT = 1e-6
"""Sizes that spread less than this share of their mean square are of one size: they say nothing of the slope."""


class Estimate:
    """Seconds of a copy by its bytes: `latency_s + nbytes / bytes_per_s`, by weighted least squares.

    Weights decay exponentially, so that a path that has become slower, or faster, is known for it after some ten
    copies. Outcomes include what waiting there was, so this is what a copy takes now, not what the wire could do.
    """

    __slots__ = ("_bytes", "_bytes2", "_product", "_seconds", "_weight", "outcomes", "prior")

    def __init__(self, bytes_per_s: float, latency_s: float):
        self.prior = (bytes_per_s, latency_s)
        self.outcomes = 0
        self._weight = self._bytes = self._seconds = self._bytes2 = self._product = 0.0

    def learn(self, nbytes: int, seconds: float) -> None:
        """A copy of `nbytes` took so long."""
        self.outcomes += 1
        if self.outcomes == 1:
            self._imagine(nbytes)
        self._weight = self._weight * DECAY + 1.0
        self._bytes = self._bytes * DECAY + nbytes
        self._seconds = self._seconds * DECAY + seconds
        self._bytes2 = self._bytes2 * DECAY + nbytes * nbytes
        self._product = self._product * DECAY + nbytes * seconds

    def line(self) -> tuple[float, float]:
        """`(bytes a second, latency in seconds)`: the first above 0, the second not below."""
        if not self.outcomes:
            return self.prior
        weight, mean, taken = self._weight, self._bytes / self._weight, self._seconds / self._weight
        spread = self._bytes2 / weight - mean * mean
        rate, latency = self.prior
        if spread > _FLAT * self._bytes2 / weight:
            slope = (self._product / weight - mean * taken) / spread
            intercept = taken - slope * mean
            if slope > 0 and intercept >= 0:
                return 1.0 / slope, intercept
        # One size only, or a line that makes no sense: the latency stays what it was, as far as there is room for it.
        latency = min(latency, taken / 2)
        return (mean / (taken - latency) if mean > 0 and taken > latency else rate), latency

    def seconds(self, nbytes: int) -> float:
        rate, latency = self.line()
        return latency + nbytes / rate

    def _imagine(self, nbytes: int) -> None:
        """Two outcomes before the first real one, as assumed, of sizes around its own: the line turns from there."""
        rate, latency = self.prior
        twice = 2.0 * nbytes
        self._weight, self._bytes, self._bytes2 = 2.0, twice, twice * twice
        self._seconds = 2 * latency + twice / rate
        self._product = twice * (latency + twice / rate)
