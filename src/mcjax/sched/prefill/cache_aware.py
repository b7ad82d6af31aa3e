"""Soonest first token, each instance with its own cache only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mcjax.sched.base import PrefillChoice
from mcjax.sched.view import ClusterView
from mcjax.types import Request


@dataclass(frozen=True)
class CacheAware:
    """Weigh the queue against the local prefix, in host memory or on the node's own SSD; never pull from elsewhere.

    Source: Mooncake (FAST'25), section 5.2, "local cache-aware".
    """

    def choose(self, request: Request, view: ClusterView, rng: np.random.Generator) -> PrefillChoice:
        local_tokens, load_s = view.reusable()
        ttft_s = view.queue_s + view.prefill_s(local_tokens)
        if view.ssd is not None:
            ttft_s += load_s
        instance = int(ttft_s.argmin())  # ties: lowest index
        return PrefillChoice(instance, reused_tokens=int(local_tokens[instance]))
