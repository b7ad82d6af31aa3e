"""Prompts ride along with the decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcjax.errors import ConfigError
from mcjax.sched.base import Batch


@dataclass(frozen=True)
class Chunked:
    """Every step decodes, and fills a token budget with the next prompt's chunk.

    Source: Sarathi-Serve (OSDI'24), section 4, "stall-free batching".
    """

    token_budget: int = 512  # tokens a step may compute in all

    def __post_init__(self) -> None:
        if self.token_budget < 1:
            raise ConfigError("sched.batching.token_budget", self.token_budget, "must be at least 1")

    def choose(self, waiting_tokens: Sequence[int], decoding: int, chunk_tokens: int) -> Batch:
        room = min(chunk_tokens, max(1, self.token_budget - decoding))
        chunks = ((0, min(waiting_tokens[0], room)),) if waiting_tokens else ()
        return Batch(chunks, decode=decoding > 0)
