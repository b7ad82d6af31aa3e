"""Kernels as they were timed on a device: a file of `benchmarks/gpu_kernels.py`, which `mcjax kernels` reads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mcjax.cost.kernel_cases import KernelCase
from mcjax.errors import ConfigError

VERSION = 1


@dataclass(frozen=True, slots=True)
class KernelTiming:
    """One implementation's time for one call."""

    case: KernelCase
    implementation: str
    """`mcjax` for what the dispatch picked, else whose it is."""
    seconds: float
    """The median."""
    spread_s: tuple[float, float]
    """The least and the most."""

    def values(self) -> dict[str, Any]:
        return {
            "case": self.case.values(),
            "implementation": self.implementation,
            "seconds": self.seconds,
            "spread_s": list(self.spread_s),
        }


@dataclass(frozen=True, slots=True)
class KernelTimings:
    """What one run of the benchmark left."""

    accelerator: str
    """As `hardware.accelerator` calls it."""
    device: str
    """As the device calls itself."""
    date: str
    versions: Mapping[str, str]
    timings: tuple[KernelTiming, ...]

    def of(self, case: KernelCase) -> list[KernelTiming]:
        """Those of exactly this case, in the file's order."""
        return [timing for timing in self.timings if timing.case == case]


def read(path: str, key: str = "measured") -> KernelTimings:
    """The timings of a file. Raises `ConfigError` naming `key` if it cannot be read, or holds nothing measured."""
    try:
        content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(key, path, "no such file; benchmarks/gpu_kernels.py writes one") from None
    except (OSError, ValueError) as problem:
        raise ConfigError(key, path, f"cannot be read ({problem})") from None
    try:
        values = cast("dict[str, Any]", content["gpu_kernels"])
        if values["version"] != VERSION:
            raise ValueError(f"version {values['version']}, this mcjax reads version {VERSION}")
        interpreted = bool(values["interpreted"])
        found = KernelTimings(
            str(values["accelerator"]),
            str(values["device"]),
            str(values["date"]),
            {str(name): str(version) for name, version in values["versions"].items()},
            tuple(_timing(one) for one in cast("Sequence[Mapping[str, Any]]", values["timings"])),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise ConfigError(key, path, f"is no file of benchmarks/gpu_kernels.py ({problem!r})") from None
    if interpreted:
        raise ConfigError(key, path, "was written in interpret mode, whose times say nothing of a device")
    return found


def _timing(values: Mapping[str, Any]) -> KernelTiming:
    case = KernelCase.of_values(values["case"])
    least, most = (float(one) for one in values["spread_s"])
    seconds = float(values["seconds"])
    if not 0 < least <= seconds <= most < math.inf:
        raise ValueError(f"{values['implementation']}: {least}, {seconds}, {most} are no times")
    return KernelTiming(case, str(values["implementation"]), seconds, (least, most))
