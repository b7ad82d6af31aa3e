"""The vector memory (VMEM) of a TPU core: how much there is, what an array takes of it, and a refusal one can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax.numpy as jnp

from mcjax.errors import KernelRefused
from mcjax.kernels.target import Target

MIB = 2**20

VMEM_BYTES = {
    "TPU v4": 16 * MIB,
    "TPU v5": 64 * MIB,  # v5p
    "TPU v5p": 64 * MIB,
    "TPU v5 lite": 128 * MIB,  # v5e
    "TPU v5e": 128 * MIB,
    "TPU v6 lite": 128 * MIB,  # v6e
    "TPU v6e": 128 * MIB,
    "TPU7x": 64 * MIB,
}
"""Of a core, by `jax.Device.device_kind`: at exactly these sizes the compiler of each kind refuses."""

UNKNOWN_KIND_BYTES = 16 * MIB
"""For kinds that are not listed: the least that any listed kind has."""


def vmem_bytes(kind: str) -> int:
    """VMEM of a core of that `jax.Device.device_kind`."""
    return VMEM_BYTES.get(kind, UNKNOWN_KIND_BYTES)


def tiled_bytes(shape: Sequence[int], dtype: Any) -> int:
    """What an array takes in VMEM: the last two axes are padded to tiles of 128 lanes by 8 words of 32 bits."""
    item = jnp.dtype(dtype).itemsize
    *outer, rows, lanes = (1, 1, *shape)
    sublanes = 8 * max(1, 4 // item)
    return prod(outer) * _up(rows, sublanes) * _up(lanes, 128) * item


def require_vmem(kernel: str, parts: Mapping[str, int], target: Target, lower: str) -> int:
    """The sum of `parts` (bytes, by what they are for), which is what to pass as `vmem_limit_bytes`.

    Raises `KernelRefused` where a core of `target.kind` has less, with both numbers, the parts, and what to `lower`.
    Nothing is refused to an interpreted body, which has no VMEM.
    """
    needed, available = sum(parts.values()), vmem_bytes(target.kind)
    if needed > available and not target.interpret:
        kind = target.kind if target.kind in VMEM_BYTES else f"{target.kind!r} (not a known kind)"
        listed = ", ".join(f"{name} {size:,}" for name, size in sorted(parts.items(), key=lambda part: -part[1]))
        raise KernelRefused(
            kernel,
            f"{needed:,} bytes of VMEM are needed and a core of {kind} has {available:,} ({listed})",
            f"lower {lower}",
        )
    return needed


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
