"""Whole steps of a model compiled for devices that are not there, without its weights: what fits, and what crosses."""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from mcjax.backends.jax.placement import Place
from mcjax.backends.jax.programs import Geometry, Programs
from mcjax.cost.model_shape import ModelShape
from mcjax.cost.parameters import Parameter
from mcjax.kernels.choice import KernelChoice
from mcjax.models.decoder import Decoder

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass(frozen=True, slots=True)
class StepReport:
    """What the compiler said of a step. Bytes are those of one device."""

    argument_bytes: int
    """Weights and pages, mostly."""
    own_output_bytes: int
    """Of outputs that lie in no argument's memory: the pages come back where they were."""
    temp_bytes: int
    code_bytes: int
    page_bytes: int
    """Of one page, as far as it lies on a device."""
    collectives: dict[str, int]
    """How many of each kind."""
    collective_bytes: dict[str, int]
    """Of their results, summed by kind."""
    seconds: float
    """That lowering and compiling took."""

    @property
    def hbm_bytes(self) -> int:
        """What must be in a device's memory at once."""
        return self.argument_bytes + self.own_output_bytes + self.temp_bytes + self.code_bytes


def abstract_model(shape: ModelShape, max_positions: int) -> Decoder:
    """A model whose parameters have shapes and types, and no numbers."""

    def zeros(name: str, parameter: Parameter) -> Array:
        return jnp.zeros(parameter.shape, shape.dtype)

    return nnx.eval_shape(lambda: Decoder(shape, max_positions, zeros))


def compile_step(
    shape: ModelShape, geometry: Geometry, place: Place, batch: int, width: int, kernels: KernelChoice
) -> StepReport:
    """The step for `batch` rows of `width` tokens, as `Programs` would compile it on the devices of `place`.

    Raises what the compiler raises, of a device whose memory is too small too.
    """
    programs = Programs(abstract_model(shape, geometry.max_context_tokens), geometry, kernels, place.platform)
    began = time.perf_counter()
    with traced_for(place, shape):
        programs.on(place).model(batch, width)
    (compiled,) = programs.on(place).compiled.values()
    seconds = time.perf_counter() - began
    memory = compiled.memory_analysis()
    counts, sizes = collectives(compiled.as_text())
    return StepReport(
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
        programs.on(place).page_bytes,
        counts,
        sizes,
        seconds,
    )


@contextlib.contextmanager
def traced_for(place: Place, shape: ModelShape) -> Iterator[None]:
    """Code that asks what device it is traced for hears of the place's, and not of the default one."""
    device = place.devices[0]
    kind = jax.sharding.AbstractDevice(
        device_kind=device.device_kind, num_cores=getattr(device, "num_cores", None), platform=device.platform
    )
    mesh = place.site(shape).mesh
    sizes, names = ((1,), ("device",)) if mesh is None else (mesh.devices.shape, mesh.axis_names)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh(sizes, names, abstract_device=kind)):
        yield


_INSTRUCTION = re.compile(rf"= (.*?) ({'|'.join(COLLECTIVES)})(-start)?\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]")


def collectives(hlo: str) -> tuple[dict[str, int], dict[str, int]]:
    """How many of each kind a compiled program has, and the bytes of their results; of asynchronous ones each start
    counts."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for result, kind, start in _INSTRUCTION.findall(hlo):
        arrays = [_bytes(*found) for found in _ARRAY.findall(result)]
        counts[kind] += 1
        # A start names its operands too.
        sizes[kind] += sum(arrays[len(arrays) // 2 :]) if start and len(arrays) > 1 else sum(arrays)
    return dict(counts), dict(sizes)


def _bytes(kind: str, bits: str, shape: str) -> int:
    count = 1
    for size in filter(None, shape.split(",")):
        count *= int(size)
    return count * (1 if kind == "pred" else max(1, int(bits) // 8))
