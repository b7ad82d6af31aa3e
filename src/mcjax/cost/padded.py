"""A cost model for programs of fixed shape: a chunk costs the same however few of its tokens are real."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import ConfigError


@dataclass(frozen=True)
class Padded:
    """Chunk = base + per token of context at its end; decode step = base + per sequence + per token of mean context.

    For engines whose steps are padded to one shape (`numerics=invariant`): every chunk computes `chunk_tokens` rows,
    and all rows of a decode step run side by side, so it takes as long as the longest one, for which the mean stands
    in. A prompt is cut from where it starts, so a splitting at multiples of `chunk_tokens` adds up, and no other.
    """

    name: str
    chunk_tokens: int
    chunk_base_ns: int
    chunk_ps_per_context_token: int
    decode_base_ns: int
    decode_ns_per_sequence: int
    decode_ps_per_context_token: int

    def __post_init__(self) -> None:
        for item in fields(self):
            value: object = getattr(self, item.name)
            least = 1 if item.name == "chunk_tokens" else 0
            if item.name != "name" and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ConfigError(f"cost.{item.name}", value, f"must be an integer of at least {least}")

    def prefill_ns(self, start_tokens: int, length_tokens: int) -> int:
        chunks = -(-length_tokens // self.chunk_tokens)
        full = chunks * (chunks + 1) // 2 * self.chunk_tokens + chunks * start_tokens
        ends = full - (chunks * self.chunk_tokens - length_tokens)  # the last chunk ends with the prompt
        return chunks * self.chunk_base_ns + ends * self.chunk_ps_per_context_token // 1000

    def step_ns(self, batch: int, context_tokens: int, steps: int) -> NDArray[np.int64]:
        """`[steps]` int64; 0 for an empty batch."""
        if batch == 0:
            return np.zeros(steps, np.int64)
        means = -(-context_tokens // batch) + np.arange(steps, dtype=np.int64)
        fixed_ns = self.decode_base_ns + self.decode_ns_per_sequence * batch
        return fixed_ns + means * self.decode_ps_per_context_token // 1000

    def mixed_ns(self, start_tokens: int, length_tokens: int, batch: int, context_tokens: int) -> int:
        """The chunk's program, then the decode program: nothing is shared."""
        step_ns = int(self.step_ns(batch, context_tokens, 1)[0])
        return self.prefill_ns(start_tokens, length_tokens) + step_ns

    def prefill_s(self, prompt_tokens: int, reused_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """`[I]` float64 seconds."""
        reused = np.asarray(reused_tokens, np.int64)
        lengths = prompt_tokens - reused
        chunks = -(-lengths // self.chunk_tokens)
        full = chunks * (chunks + 1) // 2 * self.chunk_tokens + chunks * reused
        ends = full - (chunks * self.chunk_tokens - lengths)
        return (chunks * self.chunk_base_ns + ends * self.chunk_ps_per_context_token // 1000) / 1e9

    def decode_s(self, batch: NDArray[np.int64], context_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """`[I]` float64 seconds; 0 for an empty batch."""
        rows = np.maximum(batch, 1)
        means = -(-context_tokens // rows)
        step_ns = self.decode_base_ns + self.decode_ns_per_sequence * batch
        return np.where(batch > 0, step_ns + means * self.decode_ps_per_context_token // 1000, 0) / 1e9
