"""Refuse at the door what would miss its SLO anyway."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mcjax.errors import ConfigError
from mcjax.sched.base import Admit, Expectation, Reject, Stage
from mcjax.sched.view import ClusterView
from mcjax.types import Request


@dataclass(frozen=True)
class EarlyRejection:
    """Reject when the expected TTFT or token interval exceeds the SLO: at arrival, by the load of that moment, and once
    more (token interval only) before decoding starts.

    Source: Mooncake technical report, section 7.2 and Algorithm 1, line 24.
    """

    slack: float = 1.0  # reject above this many times the SLO

    def __post_init__(self) -> None:
        if not self.slack > 0:
            raise ConfigError("sched.admission.slack", self.slack, "must be more than 0")

    def admit(
        self, request: Request, expectation: Expectation, view: ClusterView, stage: Stage, rng: np.random.Generator
    ) -> Admit | Reject:
        if stage is Stage.ARRIVAL and expectation.ttft_s > self.slack * expectation.slo_ttft_s:
            return Reject("ttft", retry_after_s=expectation.ttft_s - expectation.slo_ttft_s)
        if expectation.tbt_s > self.slack * expectation.slo_tbt_s:
            return Reject("tbt")
        return Admit()
