"""Decode where the token interval is expected to be shortest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mcjax.sched.base import DecodeChoice
from mcjax.sched.view import ClusterView
from mcjax.types import Request


@dataclass(frozen=True)
class LeastLoaded:
    """The instance with the shortest predicted step once this request has joined, among those with room for it; if none
    has room, the one with most. Source: Mooncake (FAST'25), Algorithm 1, line "SelectDecodingInstance"."""

    def choose(self, request: Request, view: ClusterView, ready_ns: int, rng: np.random.Generator) -> DecodeChoice:
        columns = view.decode
        step_s = columns.step_s(more_sequences=1, more_tokens=request.prompt_tokens)
        room = columns.free_tokens >= request.prompt_tokens + request.max_tokens
        if room.any():
            instance = int(np.where(room, step_s, np.inf).argmin())  # ties: lowest index
        else:
            instance = int(columns.free_tokens.argmax())
        return DecodeChoice(instance, float(step_s[instance]))
