"""Prompts ride along with the decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcjax.errors import ConfigError
from mcjax.sched.base import Batch


@dataclass(frozen=True)
class Chunked:
    """Every step decodes, and fills what is left of a token budget with chunks of prompts, one prompt after the other.

    Source: Sarathi-Serve (OSDI'24), section 4, "stall-free batching".
    """

    token_budget: int = 512  # tokens a step may compute in all

    def __post_init__(self) -> None:
        if self.token_budget < 1:
            raise ConfigError("sched.batching.token_budget", self.token_budget, "must be at least 1")

    def choose(self, waiting_tokens: Sequence[int], decoding: int, chunk_tokens: int) -> Batch:
        room = max(1, self.token_budget - decoding)  # a prompt gets on even where decodes fill the budget
        chunks: list[tuple[int, int]] = []
        for index in range(len(waiting_tokens)):
            tokens = min(waiting_tokens[index], chunk_tokens, room)
            chunks.append((index, tokens))
            room -= tokens
            if not room:
                break
        return Batch(tuple(chunks), decode=decoding > 0)
