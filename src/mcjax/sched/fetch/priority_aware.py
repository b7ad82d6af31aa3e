"""Hot, warm, cold: how long a span may take to come depends on where it lies, and on whose it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mcjax.errors import ConfigError
from mcjax.sched.base import Missing, Recompute, Replica
from mcjax.types import Tier


@dataclass(frozen=True)
class PriorityAware:
    """Of the replicas that are worth it the quickest, else compute.

    Hot: a host memory that is near (`near_s`) is always worth it. Warm: one that is far, or behind a busy link, is so
    if it is quicker than computing. Cold: an SSD may be later than that, since reading it leaves the instance to
    others, but only for requests that are not urgent, and by no more than a share of the time their output will take
    anyway: `patience_s_per_token` for each output token still to come.
    """

    near_s: float = 0.01  # a replica in host memory that comes within this is taken without weighing anything
    patience_s_per_token: float = 0.002  # an SSD may take so much longer than computing, an output token to come
    urgent: int = 1  # requests of this priority and above do not wait for an SSD longer than computing takes

    def __post_init__(self) -> None:
        for name in ("near_s", "patience_s_per_token"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"sched.fetch.{name}", getattr(self, name), "must be 0 or more, and finite")

    def source(self, missing: Missing, rng: np.random.Generator) -> Replica | Recompute:
        patience_s = 0.0
        if missing.priority < self.urgent:
            patience_s = self.patience_s_per_token * missing.remaining_tokens
        allowed_s = {
            Tier.DRAM: max(self.near_s, missing.recompute_s),
            Tier.SSD: missing.recompute_s + patience_s,
        }
        worth_it = [replica for replica in missing.replicas if replica.transfer_s < allowed_s[replica.tier]]
        return min(worth_it, key=lambda replica: replica.transfer_s, default=Recompute.RECOMPUTE)  # ties: first
