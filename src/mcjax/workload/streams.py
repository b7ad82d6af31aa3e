"""Seeded random streams by name, and the small validated values that workload configs are made of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mcjax.errors import ConfigError
from mcjax.types import NS_PER_S

NS_PER_US = 1_000

ARRIVALS = 0
"""Stream path of session arrivals."""
SHARED = 1
"""Stream paths `(SHARED, part, *tenant name)`: content that many sessions share."""
SESSION = 2
"""Stream paths `(SESSION, session)` and `(SESSION, session, turn + 1)`: what belongs to one session alone."""


def stream(seed: int, *path: int) -> np.random.Generator:
    """The generator at `path` under `seed`. Streams of different paths are independent: what one session draws never
    changes what another, or the arrivals, draw."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=path)))


def exponential_ns(rng: np.random.Generator, mean_s: float) -> int:
    """An exponential duration in whole microseconds (see `arrivals.arrivals_ns` for why). 0 if the mean is."""
    return round(rng.exponential(mean_s) * (NS_PER_S // NS_PER_US)) * NS_PER_US if mean_s > 0 else 0


Range = int | Sequence[int]
"""A config value `[low, high]`, both included; a single number stands for `[n, n]`."""


def bounds(key: str, value: Range, least: int) -> tuple[int, int]:
    """`(low, high)` of a range. Raises `ConfigError` naming `workload.<key>` unless `least <= low <= high`."""
    ends: list[object] = [value, value] if isinstance(value, int) else list(value)
    match ends:
        case [int(low), int(high)] if least <= low <= high:
            return low, high
        case [int(), int()]:
            raise ConfigError(f"workload.{key}", ends, f"needs {least} <= low <= high")
        case _:
            raise ConfigError(f"workload.{key}", value, "give one whole number, or two as [low, high]")


def draw(rng: np.random.Generator, ends: tuple[int, int]) -> int:
    """A uniform whole number, both ends included."""
    return int(rng.integers(ends[0], ends[1], endpoint=True))


def number(key: str, value: object, least: float) -> float:
    """`value`, or `ConfigError` naming `workload.<key>` unless it is a finite number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf"):
        raise ConfigError(f"workload.{key}", value, f"must be a number, {least} or more")
    return value


def whole(key: str, value: object, least: int) -> int:
    """`value`, or `ConfigError` naming `workload.<key>` unless it is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"workload.{key}", value, f"must be a whole number, {least} or more")
    return value


def rate(key: str, value: object) -> float:
    """`value`, or `ConfigError` naming `workload.<key>` unless it is a finite number above zero."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"workload.{key}", value, "must be a number above 0")
    return value
