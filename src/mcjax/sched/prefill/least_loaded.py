"""The shortest queue."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mcjax.sched.base import PrefillChoice
from mcjax.sched.view import ClusterView
from mcjax.types import Request


@dataclass(frozen=True)
class LeastLoaded:
    """The instance that would start soonest, blind to where the cache is; ties are drawn.

    Source: the "load balancing" baseline of Mooncake (FAST'25), section 5.2.
    """

    def choose(self, request: Request, view: ClusterView, rng: np.random.Generator) -> PrefillChoice:
        tied = np.flatnonzero(view.queue_s == view.queue_s.min())
        instance = int(tied[rng.integers(len(tied))])
        return PrefillChoice(instance, reused_tokens=int(view.reusable()[0][instance]))
