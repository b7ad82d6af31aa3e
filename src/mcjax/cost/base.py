"""What compute costs. One formula serves the simulator, the conductor's estimates and the real kernels' accounting."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class CostModel(Protocol):
    """Times of one instance's steps, as integer nanoseconds. Pure, and exact under splitting: see each method."""

    @property
    def name(self) -> str: ...

    def prefill_ns(self, start_tokens: int, length_tokens: int) -> int:
        """Compute `length_tokens` prompt tokens after `start_tokens` that are already in the cache."""
        ...

    def step_ns(self, batch: int, context_tokens: int, steps: int) -> NDArray[np.int64]:
        """`[steps]` durations of decode steps of `batch` sequences that hold `context_tokens` in total before the first
        step; each step adds one token to each sequence. `step_ns(b, c, k)[j] == step_ns(b, c + b * j, 1)[0]`."""
        ...

    def mixed_ns(self, start_tokens: int, length_tokens: int, batch: int, context_tokens: int) -> int:
        """One step that computes a prompt chunk and one decode step of `batch` sequences together."""
        ...

    def prefill_s(self, prompt_tokens: int, reused_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """`[I]` expected seconds to compute a prompt of which `reused_tokens` (`[I]`) come from the cache."""
        ...

    def decode_s(self, batch: NDArray[np.int64], context_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """`[I]` expected seconds of one decode step on each of several instances."""
        ...
