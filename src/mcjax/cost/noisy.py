"""Seeded noise on a cost model: the world runs on perturbed times that the conductor's estimates do not see."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.cost.base import CostModel
from mcjax.errors import ConfigError

_STRATA_BITS = 12
_SHARE_BITS = 20
_MASK = (1 << 64) - 1
_PREFILL, _DECODE, _MIXED = 1, 2, 3


def perturbed(cost: CostModel, sigma: float, seed: int) -> CostModel:
    """`cost` with noise of `sigma`, or `cost` itself where `sigma` is 0.

    Instances that differ in `seed` differ in their noise; with one seed for all, equal steps take equally long
    everywhere.
    """
    return Noisy(cost, sigma, seed) if sigma else cost


@dataclass(frozen=True)
class Noisy:
    """Every step and chunk of `cost` takes a lognormal factor longer or shorter; the factor's mean is 1.

    A factor is a hash of (seed, arguments of the step), not a draw from a generator: no state, so the same step takes
    the same time however often and in whatever order it is asked for, and `step_ns` splits exactly. It follows that
    chunks of a prompt no longer add up to the prompt, that a mixed step may come out below one of its parts, and that a
    step that recurs with equal arguments recurs with an equal error. `prefill_s` and `decode_s`, which estimates read,
    stay clean.

    Factors are integers over 2^20 from 4,096 equally likely strata of the distribution (so none is beyond 3.7 sigma),
    and all sums on the way are integers: equal on every machine.
    """

    cost: CostModel
    sigma: float
    """Standard deviation of the factor's logarithm: about the usual relative error. 0 to 1."""
    seed: int

    def __post_init__(self) -> None:
        if not 0 <= self.sigma <= 1:
            raise ConfigError("sigma", self.sigma, "must be 0 to 1")

    @property
    def name(self) -> str:
        return self.cost.name

    def check(self, hardware_name: str, model_name: str) -> None:
        """The clean model's check."""
        check: Any = getattr(self.cost, "check", None)
        if check is not None:
            check(hardware_name, model_name)

    @cached_property
    def _factors(self) -> NDArray[np.int64]:
        """`[4096]` over 2^20: the distribution's value in the middle of each stratum, scaled to a mean of 1."""
        count = 1 << _STRATA_BITS
        normal = NormalDist()
        values = [math.exp(self.sigma * normal.inv_cdf((index + 0.5) / count)) for index in range(count)]
        mean = math.fsum(values) / count
        return np.array([round(value / mean * (1 << _SHARE_BITS)) for value in values], np.int64)

    def _perturb(self, clean_ns: int, kind: int, *arguments: int) -> int:
        state = _mix(self.seed & _MASK ^ kind)
        for argument in arguments:
            state = _mix(state ^ argument)
        return clean_ns * int(self._factors[state >> (64 - _STRATA_BITS)]) >> _SHARE_BITS

    def prefill_ns(self, start_tokens: int, length_tokens: int) -> int:
        clean_ns = self.cost.prefill_ns(start_tokens, length_tokens)
        return self._perturb(clean_ns, _PREFILL, start_tokens, length_tokens)

    def step_ns(self, batch: int, context_tokens: int, steps: int) -> NDArray[np.int64]:
        """`[steps]` int64; 0 for an empty batch."""
        clean_ns = self.cost.step_ns(batch, context_tokens, steps)
        contexts = (context_tokens + batch * np.arange(steps, dtype=np.int64)).astype(np.uint64)
        state = np.uint64(_mix(_mix(self.seed & _MASK ^ _DECODE) ^ batch))
        strata = _mix_many(state ^ contexts) >> np.uint64(64 - _STRATA_BITS)
        return clean_ns * self._factors[strata] >> _SHARE_BITS

    def mixed_ns(self, start_tokens: int, length_tokens: int, batch: int, context_tokens: int) -> int:
        if batch == 0:
            return self.prefill_ns(start_tokens, length_tokens)
        if length_tokens == 0:
            return int(self.step_ns(batch, context_tokens, 1)[0])
        clean_ns = self.cost.mixed_ns(start_tokens, length_tokens, batch, context_tokens)
        return self._perturb(clean_ns, _MIXED, start_tokens, length_tokens, batch, context_tokens)

    def prefill_s(self, prompt_tokens: int, reused_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """The clean model's `[I]` seconds."""
        return self.cost.prefill_s(prompt_tokens, reused_tokens)

    def decode_s(self, batch: NDArray[np.int64], context_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """The clean model's `[I]` seconds."""
        return self.cost.decode_s(batch, context_tokens)


# The finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014, with the
# constants of Stafford's variant 13), applied to the state plus its increment.
_INCREMENT, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _mix(value: int) -> int:
    value = (value + _INCREMENT) & _MASK
    value = (value ^ (value >> 30)) * _FIRST & _MASK
    value = (value ^ (value >> 27)) * _SECOND & _MASK
    return value ^ (value >> 31)


def _mix_many(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`_mix` of each; unsigned products wrap around."""
    values = values + np.uint64(_INCREMENT)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND)
    return values ^ (values >> np.uint64(31))
