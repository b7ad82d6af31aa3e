"""Whole steps of real models compiled for TPUs that are not there: they fit, and no more crosses than the sharding
needs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import pytest

from mcjax.backends.jax.ahead import abstract_model, collectives, compile_step
from mcjax.backends.jax.memory import array_bytes
from mcjax.backends.jax.placement import Place
from mcjax.backends.jax.programs import Geometry, Programs
from mcjax.cost import catalogue
from mcjax.cost.model_shape import ModelShape
from mcjax.kernels.choice import KernelChoice

HLO = """
  %all-reduce.1 = bf16[64,4096]{1,0:T(8,128)(2,1)S(1)} all-reduce(%fusion.3), channel_id=1
  %all-gather-start = (f32[64,32064]{1,0}, f32[64,128256]{1,0}) all-gather-start(%dot), channel_id=2
  %all-gather-done = f32[64,128256]{1,0} all-gather-done(%all-gather-start)
  %fusion.9 = f32[8]{0} fusion(%all-reduce.1), kind=kLoop
"""


def test_collectives_are_counted_with_the_bytes_of_their_results() -> None:
    counts, sizes = collectives(HLO)
    assert counts == {"all-reduce": 1, "all-gather": 1}
    assert sizes == {"all-reduce": 64 * 4096 * 2, "all-gather": 64 * 128256 * 4}


def test_an_abstract_model_compiles_to_the_program_of_a_real_one(lab: Any) -> None:
    """On the CPU, where both can be: the same shapes of weights, and a program that takes them."""
    model, length = lab.programs.shape, lab.geometry.max_context_tokens
    programs = Programs(abstract_model(model, length), lab.geometry)
    on = programs.on(jax.local_devices()[0])
    real = lab.programs.on(jax.local_devices()[0])
    assert [(leaf.shape, leaf.dtype) for leaf in on.weights] == [(leaf.shape, leaf.dtype) for leaf in real.weights]
    assert programs.paths == lab.programs.paths
    report = compile_step(model, lab.geometry, Place((jax.local_devices()[0],)), 1, 32, KernelChoice())
    assert report.collectives == {}
    weights = sum(leaf.nbytes for leaf in real.weights)
    assert report.argument_bytes >= weights + report.page_bytes * (lab.geometry.pages + 1)


PALLAS = KernelChoice("pallas", "pallas", "pallas", "heads_first")
GEOMETRY = Geometry(
    pages=2048, page_tokens=128, max_batch=64, chunk_tokens=2048, max_context_tokens=8192, widths=(2048,)
)
HBM_BYTES = 31.2 * 2**30
"""Of a chip of TPU v6e, what libtpu lets a program have."""


LAYERS = 2
"""Compiled: enough to tell what each adds, as all are alike. Layers are unrolled, and compiling takes its time."""


def model_and_chips(model: str, topology: str) -> tuple[ModelShape, Place]:
    from mcjax.kernels.proof.tpu import tpu_mesh, tpu_topology

    mesh = tpu_mesh(topology, (len(tpu_topology(topology).devices),), ("chip",))
    return catalogue.model(model), Place(tuple(mesh.devices.flat))


STEPS = {
    # (model, topology), (rows, tokens a row), all-reduces of a layer, and beside the layers
    "a decode step of 8B on four chips": (("llama3-8b", "v6e:2x2"), (64, 1), 2, {"all-reduce": 1, "all-gather": 1}),
    # Logits of one row are put together by a sum.
    "a chunk of 8B on four chips": (("llama3-8b", "v6e:2x2"), (1, 2048), 2, {"all-reduce": 2}),
    # Two chips share a key head: each computes a half of its row of queries, keys and values, and hands it over.
    "a decode step of 70B on sixteen chips": (
        ("llama3-70b", "v6e:4x4"),
        (64, 1),
        3,
        {"all-reduce": 1, "all-gather": 1},
    ),
    "a chunk of 70B on sixteen chips": (("llama3-70b", "v6e:4x4"), (1, 2048), 3, {"all-reduce": 2}),
}


@pytest.mark.aot_tpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("where", "shape", "a_layer", "beside"), STEPS.values(), ids=STEPS)
def test_a_step_fits_and_exchanges_what_its_sharding_needs(
    where: tuple[str, str], shape: tuple[int, int], a_layer: int, beside: dict[str, int]
) -> None:
    pytest.importorskip("libtpu")
    model, place = model_and_chips(*where)
    report = compile_step(dataclasses.replace(model, layers=LAYERS), GEOMETRY, place, *shape, PALLAS)
    counts = {kind: count for kind, count in report.collectives.items() if kind != "collective-permute"}
    assert counts == {**beside, "all-reduce": beside["all-reduce"] + LAYERS * a_layer}
    assert report.collective_bytes.get("collective-permute", 0) <= 64 * LAYERS, "a few integers at most"
    # Pages stay where they are: no copy of them among the outputs or beside.
    pages_bytes = (GEOMETRY.pages + 1) * report.page_bytes
    assert report.own_output_bytes < pages_bytes
    assert report.temp_bytes < pages_bytes
    # Of all layers: weights and pages, and what two layers work in, which further ones use again.
    whole = Programs(abstract_model(model, GEOMETRY.max_context_tokens), GEOMETRY, PALLAS, "tpu").on(place)
    beside_arrays = report.hbm_bytes - report.argument_bytes
    arrays_bytes = array_bytes(whole.weights) + (GEOMETRY.pages + 1) * whole.page_bytes
    assert arrays_bytes + beside_arrays * model.layers // LAYERS < HBM_BYTES
