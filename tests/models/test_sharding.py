"""Models over devices: every family's logits on a mesh are those of one device, within rounding, through the engine's
own programs: chunks over a cached prefix, then decode."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from golden_engine import MESHES, ROWS, largest_error, logits, place, programs
from numpy.typing import NDArray
from seeded_checkpoint import shape_of

from mcjax.backends.jax.placed_weights import PlacedWeights
from mcjax.cost.model_shape import ModelShape
from mcjax.cost.parameters import parameters
from mcjax.kernels.axes import DATA, EXPERT, GROUP, TENSOR
from mcjax.models import catalogue
from mcjax.models.sharding import Rules, name_of

BOUND = 2e-5
"""Of the relative norm of logits in float32, as the parity with transformers has it."""
QUICK = {("llama", "key heads < tensor"), ("qwen3_moe", "expert 4 x tensor 2")}


@cache
def of_one_device(case: str, quantisation: str = "none") -> NDArray[np.float32]:
    return logits(programs(case, quantisation), place(1), case)


def same_within_rounding(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> None:
    """Logits within the bound; another most likely token only where two lie closer than twice the difference."""
    assert np.isfinite(found).all()
    assert largest_error(found, wanted) <= BOUND
    tolerance = np.abs(found - wanted).max()
    ours, theirs = found.argmax(-1), wanted.argmax(-1)
    gap = np.take_along_axis(wanted, theirs[..., None], -1) - np.take_along_axis(wanted, ours[..., None], -1)
    assert (gap <= 2 * tolerance).all()


@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        pytest.param(case, mesh, marks=[] if (case, mesh) in QUICK else pytest.mark.check_long, id=f"{case}, {mesh}")
        for case, meshes in MESHES.items()
        for mesh in meshes
    ],
)
def test_a_mesh_computes_what_one_device_does(case: str, mesh: str) -> None:
    where = place(*MESHES[case][mesh])
    found = logits(programs(case), where, case)
    same_within_rounding(found, of_one_device(case))


@pytest.mark.check_long
def test_rows_of_a_batch_go_over_devices_with_weights_and_pages_on_each() -> None:
    where = place(4, data=2)
    here = programs("llama").on(where)
    assert here.place.rows(programs("llama").shape, ROWS).shard_shape((ROWS, 5)) == (1, 5)
    found = logits(programs("llama"), where, "llama")
    same_within_rounding(found, of_one_device("llama"))


@pytest.mark.check_long
@pytest.mark.parametrize("case", ["llama", "qwen3_moe", "deepseek_v3"])
def test_int8_weights_lie_on_a_mesh_with_their_scales(case: str) -> None:
    made, where = programs(case, "int8"), place(4, expert=1 if case == "llama" else 2)
    found = logits(made, where, case)
    same_within_rounding(found, of_one_device(case, "int8"))
    of_scales = [
        weight.sharding.spec
        for path, weight in zip(made.paths, made.on(where).weights, strict=True)
        if getattr(path[-1], "name", "") == "scales"
    ]
    assert any((TENSOR,) in spec or (TENSOR, GROUP) in spec for spec in of_scales)


def test_int8_scales_are_cut_as_channels_are() -> None:
    made, where = programs("llama", "int8"), place(2)
    lies = {
        (name_of(path), getattr(path[-1], "name", "")): where.weight(path, leaf.shape, made.shape).shard_shape(
            leaf.shape
        )
        for path, leaf in zip(made.paths, made.leaves, strict=True)
    }
    name = "blocks.0.feed_forward"
    assert lies[f"{name}.gate_up", "numbers"] == (48, 2, 40)
    assert lies[f"{name}.gate_up", "scales"] == (1, 2, 40)
    assert lies[f"{name}.down", "numbers"] == (40, 48)  # what is summed over is cut, and has no scales
    assert lies[f"{name}.down", "scales"] == (1, 48)


def test_weights_are_quantised_on_their_way_to_the_devices() -> None:
    shape = replace(shape_of("llama"), quantisation="int8")
    whole = PlacedWeights(catalogue.load(shape, 0, 8).model)
    placed = PlacedWeights(catalogue.outline(shape, 8), catalogue.source(shape)).on(place(2))
    assert len(placed) == len(whole.leaves)
    for path, ours, theirs in zip(whole.paths, placed, whole.leaves, strict=True):
        np.testing.assert_array_equal(ours, theirs, err_msg=str(path))
        assert ours.sharding == place(2).weight(path, theirs.shape, shape)


def test_what_lies_where() -> None:
    shape = ModelShape("model", 1, 16, 8, 2, 4, 24, 96, experts=4, experts_per_token=1, dense_layers=0)
    mesh = {DATA: 1, EXPERT: 2, TENSOR: 2, GROUP: 2}
    both = (TENSOR, GROUP)
    found = {name: Rules().cut(parameter.axes, parameter.shape, mesh) for name, parameter in parameters(shape).items()}
    assert found["embedding"] == found["head"] == (both, None)
    assert found["blocks.0.attention.mix"] == (None, (TENSOR,), None, None)
    assert found["blocks.0.attention.output"] == (both, None, None)
    assert found["blocks.0.feed_forward.gate_up"] == ((EXPERT,), None, None, both)
    assert found["blocks.0.feed_forward.down"] == ((EXPERT,), both, None)
    assert found["blocks.0.feed_forward.router"] == (None, None)
    # What does not go evenly lies whole; another choice of axes is another object.
    assert Rules().cut(("vocab", None), (97, 16), mesh) == (None, None)
    assert Rules(vocab=(EXPERT,)).cut(("vocab", None), (96, 16), mesh) == ((EXPERT,), None)


def test_experts_lie_on_their_own_devices() -> None:
    made = programs("qwen3_moe")
    held = dict(zip(map(name_of, made.paths), made.on(place(8, expert=4)).weights, strict=True))
    gate_up = held["blocks.0.feed_forward.gate_up"]
    assert gate_up.sharding.shard_shape(gate_up.shape) == (2, 48, 2, 12)
