"""Prompts stop the decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcjax.sched.base import Batch


@dataclass(frozen=True)
class PrefillFirst:
    """While a prompt waits, compute it alone, chunk by chunk; decodes run when none waits.

    Source: the scheduling of vLLM 0.5 without chunked prefill, Mooncake's baseline (FAST'25, section 5.1).
    """

    def choose(self, waiting_tokens: Sequence[int], decoding: int, chunk_tokens: int) -> Batch:
        if waiting_tokens:
            return Batch(((0, min(waiting_tokens[0], chunk_tokens)),), decode=False)
        return Batch((), decode=decoding > 0)
