"""Names that differ between the releases of jax that are supported (0.10 to 0.12). Nothing else asks for a version."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from jax.experimental import pallas as pl

from mcjax.cost.kernels import KernelCost


def cost_estimate(cost: KernelCost) -> pl.CostEstimate:
    """What XLA is told of a kernel, which it cannot look into."""
    return pl.CostEstimate(flops=cost.flops, transcendentals=cost.exponentials, bytes_accessed=cost.bytes)


def store_with_conflicts(ref: Any, value: Any) -> None:
    """`ref[...] = value` in Mosaic GPU's shared memory, which from jax 0.12 on refuses where banks conflict."""
    plgpu = import_module("jax.experimental.pallas.mosaic_gpu")
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def hopper_interpreter(*, detect_races: bool = False) -> Any:
    """What a Mosaic GPU kernel takes as `interpret`: TMA, barriers and warpgroups, on the CPU. Takes minutes.

    Reads beyond an array's end find what nobody wrote, as with TMA, where they find zeros.
    """
    # Public from jax 0.12 on.
    module = import_module("jax._src.pallas.mosaic_gpu.interpret.params")
    return module.InterpretGPUParams(detect_races=detect_races, out_of_bounds_reads="uninitialized")
