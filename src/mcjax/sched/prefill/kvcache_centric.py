"""Mooncake's KVCache-centric scheduling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mcjax.errors import ConfigError
from mcjax.sched.base import PrefillChoice
from mcjax.sched.view import ClusterView
from mcjax.types import Request


@dataclass(frozen=True)
class KVCacheCentric:
    """Send the prompt where its first token is expected soonest; pull a remote prefix when it is much longer than the
    local one. Pulled prefixes stay, so hot ones spread with the load.

    Source: Mooncake (FAST'25), Algorithm 1. Beyond it, what a node's own SSD has counts as local where loading beats
    computing, and of equal prefixes the one behind the shortest queue is pulled.
    """

    balancing_threshold: float = 4.0  # pull when the best prefix is more than this many times the local one

    def __post_init__(self) -> None:
        if not self.balancing_threshold >= 1.0:
            problem = "must be at least 1: the best prefix is never shorter than the local one"
            raise ConfigError("sched.prefill.balancing_threshold", self.balancing_threshold, problem)

    def choose(self, request: Request, view: ClusterView, rng: np.random.Generator) -> PrefillChoice:
        local_tokens, load_s = view.reusable()
        holder = view.holder()
        best_tokens = view.prefix_tokens[holder]
        pull = best_tokens > self.balancing_threshold * local_tokens
        reused_tokens = np.where(pull, best_tokens, local_tokens)
        fetch_s = view.transfer_s(holder, reused_tokens - view.prefix_tokens)
        if view.ssd is not None:
            fetch_s = np.where(pull, fetch_s, load_s)
        ttft_s = view.queue_s + fetch_s + view.prefill_s(reused_tokens)
        best = int(ttft_s.argmin())  # ties: lowest index
        return PrefillChoice(best, source=holder if pull[best] else None, reused_tokens=int(reused_tokens[best]))
