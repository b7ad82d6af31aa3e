"""Compiles for a GPU where none is, down to machine code, and reads from that code what the kernels use.

That a kernel compiles says that it lowers, that it fits shared memory, and whether its registers spill. It says nothing
of its numbers or its speed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from mcjax.errors import CompileFailed, McjaxError, MissingExtra
from mcjax.kernels.proof.cubin import KernelReport, read_cubin
from mcjax.kernels.proof.executable import cubins
from mcjax.kernels.target import Target

H200 = Target("gpu", "NVIDIA H200")
"""What kernels compiled here are told that they are for."""


@dataclass(frozen=True, slots=True)
class GpuReport:
    """What the compiler made of a program. Bytes are of the device's memory."""

    device_kind: str
    kernels: tuple[KernelReport, ...]
    """All of the program's, those that XLA wrote itself among them."""
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    """Of the outputs, those that lie in an argument's memory."""
    temp_bytes: int
    lower_seconds: float
    compile_seconds: float
    hlo: str = field(repr=False)
    """The program after all passes."""

    def kernel(self, name: str) -> KernelReport:
        """The only kernel with `name` in its name. Raises `LookupError`, with all their names, if there is not one."""
        found = [kernel for kernel in self.kernels if name in kernel.name]
        if len(found) != 1:
            names = ", ".join(kernel.name for kernel in self.kernels) or "there is none"
            raise LookupError(f"{len(found)} kernels have {name!r} in their name, of: {names}")
        return found[0]


def resident_blocks(kernel: KernelReport) -> int:
    """How many blocks of a kernel a multiprocessor of an H200 holds at once, as CUDA's occupancy calculator has it."""
    assert kernel.threads is not None
    warps = -(-kernel.threads // 32)
    registers = -(-kernel.registers // 8) * 8 * 32 * warps
    shared = (kernel.shared_bytes or 0) + 1024  # what CUDA keeps for itself
    return min(65536 // registers, 233472 // shared, 64 // warps, 32)


@cache
def gpu_topology() -> topologies.TopologyDescription:
    """One H200, of the description beside this file. Raises `MissingExtra` without jax's CUDA plugin."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        raise MissingExtra("jax_cuda13_plugin", "aot-gpu")
    # As it is loaded, the plugin looks for CUDA's libraries, of which compiling needs none.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    description = resources.files("mcjax.kernels.proof").joinpath("h200.pbtxt").read_text(encoding="utf-8")
    return topologies.get_topology_desc("", "cuda", target_config=description, topology="1x1x1")


def compile_for_gpu(function: Callable[..., Any], *arguments: Any, **options: Any) -> GpuReport:
    """Lowers and compiles `function` for an H200 that is not there, and reports its kernels.

    `arguments` are trees of arrays or `jax.ShapeDtypeStruct`. A function that is jitted already keeps its options;
    another one is jitted with `options` (`donate_argnums=...`). What is no array (a layer's index, a `Target`) is bound
    before: `functools.partial(kernel, target=H200)`.

    Raises `CompileFailed`, which says which limit was hit, `MissingExtra` without jax's CUDA plugin or `ptxas`, the
    assembler: that of an installed CUDA, or of the package nvidia-cuda-nvcc.
    """
    device = gpu_topology().devices[0]
    sharding = SingleDeviceSharding(device)
    arguments = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arguments)
    abstract = AbstractDevice(device_kind=H200.kind, num_cores=None, platform="cuda")
    jitted: Any = function if hasattr(function, "lower") else jax.jit(function, **options)
    began = time.perf_counter()
    try:
        # Pallas asks which device it lowers for, and must hear of this one.
        with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("device",), abstract_device=abstract)):
            lowered = jitted.lower(*arguments)
        lowered_at = time.perf_counter()
        compiled = lowered.compile()
    except McjaxError:  # a kernel's own refusal says more than we could
        raise
    except Exception as error:
        if "No PTX compilation provider" in str(error):
            raise MissingExtra("ptxas (nvidia-cuda-nvcc)", "aot-gpu") from error
        raise CompileFailed(H200.kind, *_cause(error)) from error
    done = time.perf_counter()
    found = cubins(compiled.runtime_executable().serialize())
    memory = compiled.memory_analysis()
    return GpuReport(
        H200.kind,
        tuple(report for cubin in found for report in read_cubin(cubin.code, cubin.dynamic_shared_bytes)),
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        lowered_at - began,
        done - lowered_at,
        compiled.as_text() or "",
    )


_SHARED = (
    re.compile(r"[Ss]hared memory size limit exceeded: requested (\d+), available: (\d+)"),
    re.compile(r"smem_bytes=(\d+) > max_smem_bytes=(\d+)"),
)


def _cause(error: Exception) -> tuple[str, str]:
    """Which limit an error of the compiler is about, and what it says of it in one line."""
    text = str(error)
    for pattern in _SHARED:
        if found := pattern.search(text):
            needed, there = found.groups()
            return "shared", f"a block needs {needed} bytes, {there} are there: smaller blocks or fewer stages"
    if isinstance(error, NotImplementedError) or "Unimplemented" in text or "not implemented" in text.lower():
        return "unsupported", _first_line(text)
    return "compiler", f"{type(error).__name__}: {_first_line(text)}"


def _first_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), "")[:400].strip()
