"""What a request is promised: SLOs as multiples of what an idle instance would give, or as fixed bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mcjax.cost.base import CostModel
from mcjax.errors import ConfigError
from mcjax.types import NS_PER_S, SLO, Request


class SLOPolicy(Protocol):
    """Gives a request its bounds. Pure."""

    def bounds(self, request: Request, cost: CostModel) -> SLO: ...


@dataclass(frozen=True)
class Relative:
    """So many times the unloaded values: TTFT of the whole prompt computed with nothing cached, TBT of one decode step
    of this request alone, with its prompt as context. TTFT is in seconds of compute: queueing and transfer are inside
    the factor.
    """

    ttft_factor: float = 10.0
    tbt_factor: float = 5.0

    def __post_init__(self) -> None:
        _positive("slo.ttft_factor", self.ttft_factor)
        _positive("slo.tbt_factor", self.tbt_factor)

    def bounds(self, request: Request, cost: CostModel) -> SLO:
        prefill_ns = cost.prefill_ns(0, request.prompt_tokens)
        step_ns = int(cost.step_ns(1, request.prompt_tokens, 1)[0])
        return SLO(self.ttft_factor * prefill_ns / NS_PER_S, self.tbt_factor * step_ns / NS_PER_S)


@dataclass(frozen=True)
class Fixed:
    """The same bounds, in seconds, for every request; infinity means no bound."""

    ttft_s: float
    tbt_s: float

    def __post_init__(self) -> None:
        _positive("slo.ttft_s", self.ttft_s)
        _positive("slo.tbt_s", self.tbt_s)

    def bounds(self, request: Request, cost: CostModel) -> SLO:
        return SLO(self.ttft_s, self.tbt_s)


def _positive(key: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(key, value, "must be more than 0 (.inf for no bound)")
