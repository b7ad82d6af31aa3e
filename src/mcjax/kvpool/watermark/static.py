"""Fixed watermarks."""

from __future__ import annotations

from dataclasses import dataclass

from mcjax.errors import ConfigError
from mcjax.kvpool.base import TierReading


@dataclass(frozen=True)
class Static:
    """Evict when a reservation would fill more than `high` of the tier, down to `low`. 1.0 and 1.0: only when full."""

    low: float = 1.0
    high: float = 1.0

    def __post_init__(self) -> None:
        for name, value, most in (("high", self.high, 1.0), ("low", self.low, self.high)):
            if not 0.0 < value <= most:
                raise ConfigError(f"kvpool.watermark.{name}", value, "needs 0 < low <= high <= 1")

    def levels(self, reading: TierReading) -> tuple[float, float]:
        return self.low, self.high
