"""Fetch a missing span if that is quicker than computing it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mcjax.sched.base import Missing, Recompute, Replica


@dataclass(frozen=True)
class Cheapest:
    """The replica with the shortest expected transfer, unless recomputing is expected to be quicker still."""

    def source(self, missing: Missing, rng: np.random.Generator) -> Replica | Recompute:
        best = min(missing.replicas, key=lambda replica: replica.transfer_s, default=None)  # ties: first
        if best is None or best.transfer_s >= missing.recompute_s:
            return Recompute.RECOMPUTE
        return best
