"""A cost model computed from a model's shape and the hardware's peaks, for pairs that nobody has measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.cost import formulas
from mcjax.cost.hardware import Hardware
from mcjax.cost.kernels import keys_read
from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError

_FS_PER_S = 10**15
_FS_PER_NS = 10**6


@dataclass(frozen=True)
class Roofline:
    """FLOPs and bytes over attainable rates, plus the collectives between all accelerators of an instance.

    Prefill is compute-bound by definition: T(n) = FLOPs(n) / (peak x efficiency) + all-reduce time, a polynomial
    a n + b n^2 (of layers with a window, linear beyond it), and a chunk costs T(start + length) - T(start), so that
    splits add up exactly. What a tiny chunk really waits for, the weights, is charged in mixed steps only.

    A decode step is max(bytes / bandwidth, FLOPs / rate) + all-reduces + overheads.

    The defaults were fitted to aiconfigurator's tables of H100 and H200 and hold within 7 % there; nothing was fitted
    for TPUs (docs/cost-models.md). All sums are integer femtoseconds.
    """

    model: ModelShape
    hardware: Hardware
    compute_efficiency: float = 0.62
    """Share of peak FLOP/s that matmuls and attention reach together."""
    memory_efficiency: float = 0.90
    """Share of peak memory bandwidth that a decode step reaches while it streams."""
    layer_overhead_ns: int = 69_000
    """A decode step's fixed cost a layer: kernel launches, the latency of small all-reduces."""
    overhead_ns: int = 0
    """A decode step's fixed cost beside the layers: scheduling, sampling."""
    expert_parallel: bool = False
    """Experts lie whole on the accelerators: all-to-alls instead of the MLP's all-reduces."""
    name: str = "roofline"

    def __post_init__(self) -> None:
        for key in ("compute_efficiency", "memory_efficiency"):
            value: float = getattr(self, key)
            if not 0 < value <= 1:
                raise ConfigError(f"cost.{key}", value, "must be above 0 and at most 1")
        for key in ("layer_overhead_ns", "overhead_ns"):
            value = getattr(self, key)
            if value < 0 or value != int(value):
                raise ConfigError(f"cost.{key}", value, "must be an integer of at least 0")
            object.__setattr__(self, key, int(value))
        if self.expert_parallel and (not self.model.experts or self.model.experts % self.hardware.count):
            problem = f"needs experts that {self.hardware.count} accelerators share evenly; there are"
            raise ConfigError("cost.expert_parallel", True, f"{problem} {self.model.experts}")

    def check(self, hardware_name: str, model_name: str) -> None:
        """Raise `ConfigError` when the run's hardware or model is not the one this was built from."""
        if hardware_name != self.hardware.name:
            raise ConfigError("hardware", hardware_name, f"cost={self.name} was built for {self.hardware.name}")
        if model_name != self.model.name:
            raise ConfigError("model", model_name, f"cost={self.name} was built for {self.model.name}")

    @cached_property
    def _flops_per_s(self) -> int:
        return max(1, int(self.hardware.total_peak_flops * self.compute_efficiency))

    @cached_property
    def _bytes_per_s(self) -> int:
        return max(1, int(self.hardware.total_hbm_bytes_per_s * self.memory_efficiency))

    @cached_property
    def _collective_fs_per_token(self) -> int:
        if self.hardware.count == 1:
            return 0
        if self.expert_parallel:
            sent = formulas.expert_parallel_bytes_per_token(self.model, self.hardware.count)
        else:
            sent = formulas.collective_bytes_per_token(self.model, self.hardware.count)
        return sent * _FS_PER_S // self.hardware.interconnect_bytes_per_s

    @cached_property
    def _attention_fs(self) -> tuple[tuple[int | None, int, int], ...]:
        """Of the layers of each window: to read what they cache of a token, and for one query to attend to it."""
        read, attend = self.model.layer_kv_bytes * _FS_PER_S, formulas.layer_pair_flops(self.model) * _FS_PER_S
        return tuple(
            (window, layers * read // self._bytes_per_s, layers * attend // self._flops_per_s)
            for window, layers in self.model.window_layers
        )

    @cached_property
    def _sequence_fs(self) -> int:
        """Matmuls of one decoding sequence, logits included."""
        flops = formulas.matmul_flops_per_token(self.model) + formulas.head_flops(self.model)
        return flops * _FS_PER_S // self._flops_per_s

    @cached_property
    def _fixed_fs(self) -> int:
        return (self.overhead_ns + self.layer_overhead_ns * self.model.layers) * _FS_PER_NS

    @cached_property
    def _dense_weights_fs(self) -> int:
        return formulas.weight_read_bytes(self.model, 1) * _FS_PER_S // self._bytes_per_s

    def _weights_fs(self, tokens: int) -> int:
        """One read of the weights that a step over `tokens` tokens touches."""
        if not self.model.experts:
            return self._dense_weights_fs
        return _weight_read_bytes(self.model, tokens) * _FS_PER_S // self._bytes_per_s

    def _compute_fs(self, tokens: int) -> int:
        """FLOPs of a whole prompt of `tokens` over the attainable rate."""
        matmul, attention = self._flops
        flops = tokens * matmul + formulas.prompt_pairs(self.model, 0, tokens) * attention
        return flops * _FS_PER_S // self._flops_per_s

    @cached_property
    def _flops(self) -> tuple[int, int]:
        """Of one token, and of one query over one key in one layer."""
        return formulas.matmul_flops_per_token(self.model), formulas.layer_pair_flops(self.model)

    def _prompt_ns(self, tokens: int) -> int:
        """T(n), cumulative, rounded down to whole nanoseconds."""
        return (self._compute_fs(tokens) + self._collective_fs_per_token * tokens) // _FS_PER_NS

    def prefill_ns(self, start_tokens: int, length_tokens: int) -> int:
        return self._prompt_ns(start_tokens + length_tokens) - self._prompt_ns(start_tokens)

    def step_ns(self, batch: int, context_tokens: int, steps: int) -> NDArray[np.int64]:
        """`[steps]` int64; 0 for an empty batch."""
        if batch == 0:
            return np.zeros(steps, np.int64)
        contexts = context_tokens + batch * np.arange(steps, dtype=np.int64)
        return self._decode_ns(batch, contexts, self._weights_fs(batch))

    def mixed_ns(self, start_tokens: int, length_tokens: int, batch: int, context_tokens: int) -> int:
        """FLOPs of both parts against one read of the weights and of everybody's KV, plus all-reduces and overheads.

        With an empty batch this is `prefill_ns`; with an empty chunk, the decode step.
        """
        if batch == 0:
            return self.prefill_ns(start_tokens, length_tokens)
        end_tokens = start_tokens + length_tokens
        attended = context_tokens + batch
        compute_fs = self._compute_fs(end_tokens) - self._compute_fs(start_tokens)
        compute_fs += batch * self._sequence_fs
        memory_fs = self._weights_fs(batch + length_tokens)
        for window, read_fs, attend_fs in self._attention_fs:
            seen = attended if window is None else min(attended, batch * window)
            compute_fs += seen * attend_fs
            memory_fs += (seen + keys_read(end_tokens, length_tokens, window)) * read_fs
        fixed_fs = self._fixed_fs + (batch + length_tokens) * self._collective_fs_per_token
        return (max(memory_fs, compute_fs) + fixed_fs) // _FS_PER_NS

    @cached_property
    def _prefill_s_per_token(self) -> float:
        matmul_s = formulas.matmul_flops_per_token(self.model) / self._flops_per_s
        return matmul_s + self._collective_fs_per_token / _FS_PER_S

    @cached_property
    def _prefill_s_per_pair(self) -> tuple[tuple[int | None, float], ...]:
        """Of the layers of each window, those that see everything first."""
        flops = formulas.layer_pair_flops(self.model)
        return tuple((window, layers * flops / self._flops_per_s) for window, layers in self.model.window_layers)

    def prefill_s(self, prompt_tokens: int, reused_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """`[I]` float64 seconds."""
        return self._prompt_s(prompt_tokens) - self._prompt_s(reused_tokens)

    def _prompt_s(self, tokens: Any) -> Any:
        """Of a whole prompt of so many tokens, a number or an array of them."""
        per_token_s, windowed_s = self._prefill_s_per_token, 0.0
        for window, pair_s in self._prefill_s_per_pair:
            if window is None:
                per_token_s = per_token_s + pair_s / 2 * (tokens + 1)  # n (n + 1) / 2 pairs
            else:
                within = np.minimum(tokens, window)
                windowed_s = windowed_s + pair_s * within * (tokens - (within - 1) / 2)
        return tokens * per_token_s + windowed_s

    @cached_property
    def _decode_rates_s(self) -> tuple[float, float, float]:
        """A step's fixed time, a sequence's compute, its all-reduces."""
        fixed, sequence, collective = (
            part / _FS_PER_S for part in (self._fixed_fs, self._sequence_fs, self._collective_fs_per_token)
        )
        return fixed, sequence, collective

    @cached_property
    def _attention_s(self) -> tuple[tuple[int | None, float, float], ...]:
        return tuple((window, read / _FS_PER_S, attend / _FS_PER_S) for window, read, attend in self._attention_fs)

    def decode_s(self, batch: NDArray[np.int64], context_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """`[I]` float64 seconds; 0 for an empty batch."""
        fixed_s, sequence_s, collective_s = self._decode_rates_s
        attended = context_tokens + batch
        memory_s, compute_s = np.zeros(len(attended)), batch * sequence_s
        for window, read_s, attend_s in self._attention_s:
            seen = attended if window is None else np.minimum(attended, batch * window)
            memory_s += seen * read_s
            compute_s += seen * attend_s
        if self.model.experts:
            memory_s += np.array([self._weights_fs(count) / _FS_PER_S for count in batch.tolist()])
        else:
            memory_s += self._dense_weights_fs / _FS_PER_S
        step_s = np.maximum(memory_s, compute_s)
        step_s += batch * collective_s + fixed_s
        return step_s if batch.all() else np.where(batch > 0, step_s, 0.0)

    def _decode_ns(
        self,
        batch: int | NDArray[np.int64],
        context_tokens: NDArray[np.int64],
        weights_fs: int | NDArray[np.int64],
    ) -> NDArray[np.int64]:
        attended = context_tokens + batch
        memory_fs, compute_fs = weights_fs, batch * self._sequence_fs
        for window, read_fs, attend_fs in self._attention_fs:
            seen = attended if window is None else np.minimum(attended, batch * window)
            memory_fs = memory_fs + seen * read_fs
            compute_fs = compute_fs + seen * attend_fs
        fixed_fs = self._fixed_fs + batch * self._collective_fs_per_token
        return (np.maximum(memory_fs, compute_fs) + fixed_fs) // _FS_PER_NS


@lru_cache(maxsize=4096)
def _weight_read_bytes(model: ModelShape, tokens: int) -> int:
    """Kept, because the exact count of touched experts takes powers of large integers."""
    return formulas.weight_read_bytes(model, tokens)
