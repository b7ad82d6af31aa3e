"""A cost model whose constants were fitted to measurements of one model on one kind of hardware."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import ConfigError

_FS_PER_NS = 1_000_000


@dataclass(frozen=True)
class Fitted:
    """Prefill T(n) = a n + b n^2, decode step = base + per sequence + per context token. Integers only.

    A chunk costs T(start + length) - T(start), with T rounded to whole nanoseconds, so any splitting of a prompt adds
    up exactly. A cached prefix is `start` that nobody computes. Because of that exactness T has no constant term: a
    chunk of a few tokens costs less here than the weight read that it really takes; `mixed_ns` has that floor.

    `fitted_hardware` and `fitted_model` say what was measured; see `check`.
    """

    name: str
    prefill_ps_per_token: int
    """a. Picoseconds."""
    prefill_fs_per_token_squared: int
    """b. Femtoseconds."""
    decode_base_ns: int
    """One decode step: reading the weights, launching the kernels."""
    decode_ns_per_sequence: int
    decode_ps_per_context_token: int
    """Reading one cached token's KV. Picoseconds."""
    fitted_hardware: str = ""
    fitted_model: str = ""
    allow_mismatch: bool = False

    def __post_init__(self) -> None:
        for key in (
            "prefill_ps_per_token",
            "prefill_fs_per_token_squared",
            "decode_base_ns",
            "decode_ns_per_sequence",
            "decode_ps_per_context_token",
        ):
            value: object = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"cost.{key}", value, "must be an integer of at least 0")

    def check(self, hardware_name: str, model_name: str) -> None:
        """Raise `ConfigError` when the run's hardware or model is not what the constants were fitted on."""
        if self.allow_mismatch:
            return
        for key, used, fitted in (
            ("hardware", hardware_name, self.fitted_hardware),
            ("model", model_name, self.fitted_model),
        ):
            if fitted and used != fitted:
                problem = f"cost={self.name} was fitted on {fitted}; use cost=roofline, or cost.allow_mismatch=true"
                raise ConfigError(key, used, problem)

    def _prompt_ns(self, tokens: int) -> int:
        """T(n), cumulative, rounded down to whole nanoseconds."""
        linear_fs = self.prefill_ps_per_token * 1000 * tokens
        return (linear_fs + self.prefill_fs_per_token_squared * tokens * tokens) // _FS_PER_NS

    def prefill_ns(self, start_tokens: int, length_tokens: int) -> int:
        return self._prompt_ns(start_tokens + length_tokens) - self._prompt_ns(start_tokens)

    def _variable_decode_ns(self, batch: int, context_tokens: int) -> int:
        return self.decode_ns_per_sequence * batch + self.decode_ps_per_context_token * context_tokens // 1000

    def step_ns(self, batch: int, context_tokens: int, steps: int) -> NDArray[np.int64]:
        """`[steps]` int64; 0 for an empty batch."""
        if batch == 0:
            return np.zeros(steps, np.int64)
        contexts = context_tokens + batch * np.arange(steps, dtype=np.int64)
        fixed_ns = self.decode_base_ns + self.decode_ns_per_sequence * batch
        return fixed_ns + contexts * self.decode_ps_per_context_token // 1000

    def mixed_ns(self, start_tokens: int, length_tokens: int, batch: int, context_tokens: int) -> int:
        """chunk + per sequence + per context token, never below the decode step alone.

        The weights are read once for both parts, and a chunk's own a n already holds that read: so the base counts only
        as a floor under the chunk.
        """
        chunk_ns = self.prefill_ns(start_tokens, length_tokens)
        if batch == 0:
            return chunk_ns
        variable_ns = self._variable_decode_ns(batch, context_tokens)
        return variable_ns + max(chunk_ns, self.decode_base_ns)

    def prefill_s(self, prompt_tokens: int, reused_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """`[I]` float64 seconds."""
        reused = np.asarray(reused_tokens, np.float64)
        linear_s = self.prefill_ps_per_token * 1e-12 * (prompt_tokens - reused)
        return linear_s + self.prefill_fs_per_token_squared * 1e-15 * (float(prompt_tokens) ** 2 - reused * reused)

    def decode_s(self, batch: NDArray[np.int64], context_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """`[I]` float64 seconds; 0 for an empty batch."""
        step_ns = self.decode_base_ns + self.decode_ns_per_sequence * batch
        return np.where(batch > 0, step_ns + self.decode_ps_per_context_token * context_tokens // 1000, 0) / 1e9
