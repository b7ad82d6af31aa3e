"""When sessions start: renewal processes with a given rate and burstiness, and rates that follow the day or burst."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mcjax.errors import ConfigError
from mcjax.types import NS_PER_S
from mcjax.workload.streams import NS_PER_US, number, rate

FAMILIES = ("gamma", "weibull")
"""The two families of gaps that ServeGen (arXiv 2505.09999) fits to real clients."""


@dataclass(frozen=True, slots=True)
class Diurnal:
    """The rate follows a sine: `1 + amplitude` times the mean at `peak_s`, `1 - amplitude` half a period later."""

    amplitude: float
    period_s: float = 86_400.0
    peak_s: float = 0.0

    def __post_init__(self) -> None:
        number("diurnal.amplitude", self.amplitude, 0)
        if self.amplitude >= 1:
            raise ConfigError("workload.diurnal.amplitude", self.amplitude, "must be below 1: the rate would stop")
        rate("diurnal.period_s", self.period_s)
        number("diurnal.peak_s", self.peak_s, 0)

    def elapsed_s(self, times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Integral of the relative rate from 0."""
        turn = 2 * math.pi / self.period_s
        swing = np.sin(turn * (times_s - self.peak_s)) + math.sin(turn * self.peak_s)
        return times_s + self.amplitude / turn * swing

    def bounds(self) -> tuple[float, float]:
        """Least and greatest relative rate."""
        return 1 - self.amplitude, 1 + self.amplitude


@dataclass(frozen=True, slots=True)
class Burst:
    """Every `every_s` the rate is `factor` times the usual for `length_s`; the first burst comes at `every_s`."""

    factor: float
    every_s: float
    length_s: float

    def __post_init__(self) -> None:
        rate("burst.factor", self.factor)
        rate("burst.every_s", self.every_s)
        rate("burst.length_s", self.length_s)
        if self.length_s >= self.every_s:
            raise ConfigError("workload.burst.length_s", self.length_s, f"must be below every_s={self.every_s}")

    def elapsed_s(self, times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        cycles, into_s = np.divmod(times_s, self.every_s)
        bursting_s = np.maximum(cycles - 1, 0) * self.length_s + (cycles >= 1) * np.minimum(into_s, self.length_s)
        return times_s + (self.factor - 1) * bursting_s

    def bounds(self) -> tuple[float, float]:
        return min(1.0, self.factor), max(1.0, self.factor)


Modulation = Diurnal | Burst


def modulation(diurnal: Mapping[str, float] | None, burst: Mapping[str, float] | None) -> Modulation | None:
    """The one that is given. Raises `ConfigError` if both are, or for keys that do not exist or are missing."""
    if diurnal is not None and burst is not None:
        raise ConfigError("workload.burst", dict(burst), "not together with workload.diurnal; superpose two workloads")
    for key, given, make in (("diurnal", diurnal, Diurnal), ("burst", burst, Burst)):
        if given is not None:
            try:
                return make(**given)
            except TypeError:
                names = list(make.__dataclass_fields__)
                raise ConfigError(f"workload.{key}", dict(given), "has unknown keys or lacks some", names) from None
    return None


def weibull_shape(cv: float) -> float:
    """The shape k for which Weibull gaps have this coefficient of variation (0.02 .. 1,000)."""

    def cv_of(shape: float) -> float:
        return math.sqrt(math.expm1(math.lgamma(1 + 2 / shape) - 2 * math.lgamma(1 + 1 / shape)))

    low, high = 0.1, 100.0
    if not cv_of(high) <= cv <= cv_of(low):
        allowed = f"{cv_of(high):.3f} .. {cv_of(low):.0f}"
        raise ConfigError("workload.arrival_cv", cv, f"no Weibull gaps are like that; allowed: {allowed}")
    for _ in range(80):  # cv falls as the shape grows; halving reaches the last bit
        middle = (low + high) / 2
        low, high = (middle, high) if cv_of(middle) > cv else (low, middle)
    return (low + high) / 2


def unit_gaps(rng: np.random.Generator, count: int, family: str, shape: float) -> NDArray[np.float64]:
    """`[count]` gaps of mean 1. `shape` is the family's own (1 is exponential in both)."""
    if family == "weibull":
        return rng.weibull(shape, count) / math.gamma(1 + 1 / shape)
    return rng.gamma(shape, 1 / shape, count)


def arrivals_ns(
    rng: np.random.Generator,
    count: int,
    rate_per_s: float,
    cv: float = 1.0,
    family: str = "gamma",
    modulated: Modulation | None = None,
) -> NDArray[np.int64]:
    """`[count]` arrival times (ns, ascending): mean rate `rate_per_s`, coefficient of variation `cv` of the gaps.

    `cv == 1` is a Poisson process, `cv == 0` an even beat; others have gaps of the `family`. With `modulated` the gaps
    are those of a clock that goes as fast as the rate is high. Gaps (modulated: times) are whole microseconds: a
    last-bit difference between two machines' maths libraries then cannot reach an arrival, except once in millions. The
    first `n` do not depend on `count`.
    """
    if family not in FAMILIES:
        raise ConfigError("workload.arrival_family", family, "no such family of gaps", FAMILIES)
    mean_us = NS_PER_S / NS_PER_US / rate_per_s
    if cv == 0:
        gaps_us = np.full(count, mean_us)
    elif cv == 1:
        gaps_us = rng.exponential(mean_us, count)
    elif family == "weibull":
        gaps_us = unit_gaps(rng, count, family, weibull_shape(cv)) * mean_us
    else:
        shape = 1.0 / (cv * cv)
        gaps_us = rng.gamma(shape, mean_us / shape, count)
    if modulated is not None:
        times_s = _invert(modulated.elapsed_s, np.cumsum(gaps_us) * 1e-6, modulated.bounds())
        return np.rint(times_s * 1e6).astype(np.int64) * NS_PER_US
    return np.cumsum(np.rint(gaps_us).astype(np.int64)) * NS_PER_US


def _invert(
    elapsed_s: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    targets_s: NDArray[np.float64],
    bounds: tuple[float, float],
) -> NDArray[np.float64]:
    """Times at which `elapsed_s`, whose slope lies within `bounds`, reaches the targets: by halving, all at once."""
    low, high = targets_s / bounds[1], targets_s / bounds[0]
    for _ in range(64):
        middle = (low + high) / 2
        early = elapsed_s(middle) < targets_s
        low, high = np.where(early, middle, low), np.where(early, high, middle)
    return np.maximum.accumulate(high)
