"""Fetch a missing span if that is quicker than computing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mcjax.sched.base import Recompute, Replica
from mcjax.types import Span


@dataclass(frozen=True)
class Cheapest:
    """The replica with the shortest expected transfer, unless recomputing is expected to be quicker still."""

    def source(
        self, span: Span, replicas: Sequence[Replica], recompute_s: float, rng: np.random.Generator
    ) -> Replica | Recompute:
        best = min(replicas, key=lambda replica: replica.transfer_s, default=None)  # ties: first
        if best is None or best.transfer_s >= recompute_s:
            return Recompute.RECOMPUTE
        return best
