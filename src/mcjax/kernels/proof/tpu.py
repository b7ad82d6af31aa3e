"""Compiles for TPUs that are not there: libtpu holds the whole compiler and needs no device.

That a kernel compiles says that it lowers, and that it fits VMEM, SMEM and HBM. It says nothing of its numbers or its
speed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
from jax.experimental import mesh_utils, topologies
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, SingleDeviceSharding

from mcjax.errors import CompileFailed, ConfigError, McjaxError, MissingExtra
from mcjax.kernels.pages import KVPages

TOPOLOGIES = ("v5e:2x2", "v6e:2x2")
"""Of the two kinds of TPU that kernels are proven for, the smallest that every supported libtpu knows."""

WITHOUT_TPU = {
    # Else the first process to load libtpu keeps every other one out of it.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # What libtpu asks the machine for as it is loaded, and complains of at length where no TPU is. None of it decides
    # what is compiled for.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
"""What the environment says while libtpu is loaded, unless it says something else already."""


@dataclass(frozen=True, slots=True)
class TpuReport:
    """What the compiler said of a program that it took. Bytes are a device's, and narrow rows are padded to a tile."""

    topology: str
    device_kind: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    """Of the outputs, those that lie in an argument's memory."""
    temp_bytes: int
    code_bytes: int
    lower_seconds: float
    compile_seconds: float
    hlo: str = field(repr=False)
    """The program after all passes, collectives included."""

    @property
    def hbm_bytes(self) -> int:
        """What must be in a device's memory at once."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes + self.code_bytes


@cache
def tpu_topology(name: str) -> topologies.TopologyDescription:
    """The topology of that name, such as "v5e:2x2" or "v6e:4x4".

    Raises `MissingExtra` without libtpu, `ConfigError` for a name that it does not know.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise MissingExtra("libtpu", "aot-tpu")
    with _environment(WITHOUT_TPU):
        try:
            return topologies.get_topology_desc(topology_name=name, platform="tpu")
        except jax.errors.JaxRuntimeError as error:
            if "INVALID_ARGUMENT" not in str(error):
                raise CompileFailed(name, *_cause(error)) from error
            problem = f"libtpu does not know it ({_first_line(error)})"
            raise ConfigError("topology", name, problem, TOPOLOGIES) from error


def tpu_mesh(topology: str, shape: Sequence[int], names: Sequence[str]) -> Mesh:
    """A mesh of all devices of a topology, of whose sharding the structures given to `compile_for_tpu` can be."""
    devices = list(tpu_topology(topology).devices)
    return Mesh(mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True), tuple(names))


def compile_for_tpu(
    function: Callable[..., Any], *arguments: Any, topology: str = "v6e:2x2", mesh: Mesh | None = None, **options: Any
) -> TpuReport:
    """Lowers and compiles `function` for a topology that is not there, and says what the compiler made of it.

    `arguments` are trees of arrays or `jax.ShapeDtypeStruct`. Without a `mesh` (see `tpu_mesh`) all of them are on one
    device, and lie there as XLA likes best unless a structure has a `Format` of its own (see `on_tpu`); with a mesh,
    each structure has its own sharding. A function that is jitted already keeps its options; another
    one is jitted with `options` (`donate_argnums=...`). What is no array (a layer's index, a `Target`) is bound before:
    `functools.partial(kernel, target=target)`.

    Raises `CompileFailed`, which says which limit was hit, `MissingExtra` without libtpu.
    """
    devices = tpu_topology(topology).devices
    kind = devices[0].device_kind
    if mesh is None:
        abstract = AbstractDevice(device_kind=kind, num_cores=devices[0].num_cores, platform="tpu")
        surrounding = AbstractMesh((1,), ("device",), abstract_device=abstract)
        sharding = SingleDeviceSharding(devices[0])
        arguments = jax.tree.map(lambda leaf: _placed(leaf, sharding), arguments)
    else:
        surrounding = mesh.abstract_mesh
    jitted = function if hasattr(function, "lower") else jax.jit(function, **options)
    began = time.perf_counter()
    try:
        # Code that asks which device it is traced for must hear of this one, and not of the CPU.
        with jax.sharding.use_abstract_mesh(surrounding):
            lowered = jitted.lower(*arguments)  # pyright: ignore[reportFunctionMemberAccess]
        lowered_at = time.perf_counter()
        compiled = lowered.compile()
    except McjaxError:  # a kernel's own refusal says more than we could
        raise
    except Exception as error:
        raise CompileFailed(topology, *_cause(error)) from error
    done = time.perf_counter()
    memory = compiled.memory_analysis()
    assert memory is not None
    return TpuReport(
        topology,
        kind,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
        lowered_at - began,
        done - lowered_at,
        compiled.as_text() or "",
    )


def on_tpu(pages: KVPages, topology: str) -> KVPages:
    """Structures of pages on a device of the topology, which lie as `KVPages.formats` says."""
    formats = pages.formats(SingleDeviceSharding(tpu_topology(topology).devices[0]))
    return jax.tree.map(
        lambda leaf, wanted: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=wanted), pages, formats
    )


def _placed(leaf: Any, sharding: SingleDeviceSharding) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None:
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


_TOO_LARGE = re.compile(r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\).*?space=(\w+)", re.DOTALL)
_SCOPED = re.compile(r"(?i)\bran out of memory in memory space (\w+)")


def _cause(error: Exception) -> tuple[str, str]:
    """Which limit an error of the compiler is about, and what it says of it in one line."""
    text = str(error)
    if found := _TOO_LARGE.search(text):
        needed, there, space = found.groups()
        return space, f"{needed} bytes in an allocation, {there} are there ({_first_line(text[found.end() :])})"
    if found := _SCOPED.search(text):
        return found.group(1).lower(), _first_line(text)
    if "memory on HBM" in text or "CompileTimeHbmOom" in text:
        return "hbm", _first_line(text)
    if isinstance(error, NotImplementedError) or "Unimplemented" in text or "not implemented" in text.lower():
        return "unsupported", _first_line(text)
    return "compiler", f"{type(error).__name__}: {_first_line(text)}"


def _first_line(text: object) -> str:
    return next((line for line in str(text).splitlines() if line.strip()), "")[:400].strip()


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """With variables that are not set yet set to `values`."""
    added = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
