"""Spare the instance whatever comes in time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mcjax.errors import ConfigError
from mcjax.sched.base import Missing, Recompute, Replica


@dataclass(frozen=True)
class Deadline:
    """Fetch what comes within a bound, even where computing is quicker: every prompt behind this one waits for what is
    computed, nobody for what is fetched. What would come later is fetched only if it beats computing.

    The bound is halved with each step of priority above 0, and doubled with each below.
    """

    within_s: float = 0.5  # how long a request of priority 0 may wait for a span

    def __post_init__(self) -> None:
        if not 0 <= self.within_s < math.inf:
            raise ConfigError("sched.fetch.within_s", self.within_s, "must be 0 or more, and finite")

    def source(self, missing: Missing, rng: np.random.Generator) -> Replica | Recompute:
        best = min(missing.replicas, key=lambda replica: replica.transfer_s, default=None)  # ties: first
        if best is None:
            return Recompute.RECOMPUTE
        bound_s = math.ldexp(self.within_s, max(-64, min(64, -missing.priority)))
        return best if best.transfer_s < max(bound_s, missing.recompute_s) else Recompute.RECOMPUTE
