"""Take everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mcjax.sched.base import Admit, Expectation, Reject, Stage
from mcjax.sched.view import ClusterView
from mcjax.types import Request


@dataclass(frozen=True)
class AdmitAll:
    """No request is refused; overload shows as queueing."""

    asked_at: ClassVar[tuple[Stage, ...]] = ()

    def admit(
        self, request: Request, expectation: Expectation, view: ClusterView, stage: Stage, rng: np.random.Generator
    ) -> Admit | Reject:
        return Admit()
