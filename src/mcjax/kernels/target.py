"""What a kernel is compiled for. Said by the caller: when code is compiled ahead of time, no device is there to ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Platform = Literal["tpu", "gpu"]


@dataclass(frozen=True, slots=True)
class Target:
    """A platform and a kind of device, as `jax.Device.device_kind` names it; or that platform's body, interpreted."""

    platform: Platform
    kind: str = ""
    interpret: bool = False
    """Run the body step by step on the CPU: right results, no speed."""

    @classmethod
    def of(cls, device: Any) -> Target:
        """That of a `jax.Device`. On a CPU it is the TPU's body, interpreted."""
        platforms: dict[str, Platform] = {"tpu": "tpu", "gpu": "gpu", "cuda": "gpu"}
        if device.platform not in platforms:
            return cls("tpu", interpret=True)
        return cls(platforms[device.platform], device.device_kind)
