"""Any instance, with equal chance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mcjax.sched.base import PrefillChoice
from mcjax.sched.view import ClusterView
from mcjax.types import Request


@dataclass(frozen=True)
class Random:
    """A uniform draw; what the instance happens to hold of the prompt is reused."""

    def choose(self, request: Request, view: ClusterView, rng: np.random.Generator) -> PrefillChoice:
        instance = int(rng.integers(len(view.names)))
        return PrefillChoice(instance, reused_tokens=int(view.reusable()[0][instance]))
