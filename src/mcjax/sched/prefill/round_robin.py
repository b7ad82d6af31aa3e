"""Instances in turn."""

from __future__ import annotations

import numpy as np

from mcjax.sched.base import PrefillChoice
from mcjax.sched.view import ClusterView
from mcjax.types import Request


class RoundRobin:
    """The next instance after the last one chosen, whatever the load."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, request: Request, view: ClusterView, rng: np.random.Generator) -> PrefillChoice:
        instance = self._turn % len(view.names)
        self._turn += 1
        return PrefillChoice(instance, reused_tokens=int(view.reusable()[0][instance]))
