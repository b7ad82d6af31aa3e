"""Instances that span devices: what a config may say, and that blocks move between unequal meshes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from mcjax.backends.jax.meshes import MeshAxes, Meshes, allot, check_divides, divides, read_meshes
from mcjax.backends.jax.placement import Place
from mcjax.cost.architecture import Latent
from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError
from mcjax.models.sharding import axes_of
from mcjax.types import Role

SIZES = (1, 2, 4)  # what four query heads can be cut into; two key heads lie whole on each of four devices
PREFILL_PAGES = list(range(16))
DECODE_PAGES = [39, 3, 22, 17, 8, 30, 1, 12, 25, 6, 33, 19, 14, 27, 36, 10]


def model(heads: int, kv_heads: int, d_ff: int, **more: Any) -> ModelShape:
    return ModelShape("model", 2, 8 * heads, heads, kv_heads, 8, d_ff, 259, **more)


@pytest.mark.parametrize(
    ("value", "meshes"),
    [
        (None, Meshes()),
        (2, Meshes(MeshAxes(2), MeshAxes(2), MeshAxes(2))),
        ({"tensor": 3}, Meshes(MeshAxes(3), MeshAxes(3), MeshAxes(3))),
        ({"prefill": {"tensor": 2, "expert": 4}, "decode": 4}, Meshes(MeshAxes(2, 4), MeshAxes(4), MeshAxes())),
        ({"decode": {"expert": 2}}, Meshes(decode=MeshAxes(1, 2))),
    ],
)
def test_what_a_config_may_say(value: object, meshes: Meshes) -> None:
    assert read_meshes(value) == meshes
    assert meshes.each([Role.DECODE, Role.PREFILL]) == (meshes.decode, meshes.prefill)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (0, "backend.mesh=0: must be a whole number"),
        ({"prefil": 2}, "backend.mesh.prefil=2: is no role"),
        ({"prefill": {"data": 2}}, r"backend.mesh.prefill.data=2: .*more instances \(cluster=4m\) are replicas"),
        ({"prefill": {"group": 2}}, "backend.mesh.prefill.group=2: is no axis"),
        ({"decode": {"tensor": True}}, "backend.mesh.decode.tensor=True: must be a whole number"),
    ],
)
def test_what_a_config_may_not_say(value: object, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_meshes(value)


def test_sizes_that_do_not_divide_the_model_are_refused_with_those_that_do() -> None:
    smollm2 = model(heads=9, kv_heads=3, d_ff=1536)
    with pytest.raises(ConfigError, match=r"9 query heads, 3 key heads, .* 2 parts; allowed: 1, 3$"):
        check_divides(smollm2, MeshAxes(2))
    check_divides(smollm2, MeshAxes(3))
    check_divides(model(heads=8, kv_heads=2, d_ff=64), MeshAxes(8))


def test_experts_go_over_devices_whole_beside_what_is_cut_and_latents_lie_on_all() -> None:
    experts = {"experts": 6, "experts_per_token": 2, "expert_d_ff": 20}
    assert [size for size in range(1, 9) if divides(model(8, 8, 64, **experts), size)] == [1, 2, 4]
    assert [size for size in range(1, 7) if divides(model(6, 6, 60, **experts), size)] == [1, 2]
    dense = {"dense_layers": 1, "shared_experts": 1}
    assert [size for size in range(1, 9) if divides(model(8, 8, 4, **experts, **dense), size)] == [1, 2, 4]
    with pytest.raises(ConfigError, match=r"8 query heads, latents, d_ff=4, experts of .*; allowed: 1, 2, 4$"):
        check_divides(model(8, 8, 4, **experts, **dense, latent=Latent(16, 4, 4, 8)), MeshAxes(8))
    check_divides(model(8, 8, 64, latent=Latent(16, 4, 4, 8)), MeshAxes(8))
    check_divides(model(8, 8, 64, **experts), MeshAxes(4, 3))
    with pytest.raises(ConfigError, match=r"backend\.mesh\.expert=4: 6 experts do not go .*; allowed: 1, 2, 3, 6$"):
        check_divides(model(8, 8, 64, **experts), MeshAxes(1, 4))
    with pytest.raises(ConfigError, match=r"0 experts do not go into 2 parts; allowed: 1$"):
        check_divides(model(8, 8, 64), MeshAxes(1, 2))


def test_groups_are_disjoint_and_single_devices_may_be_shared() -> None:
    assert allot([2, 1, 1], 4) == [(0, 1), (2,), (3,)]
    assert allot([1, 1, 1], 2) == [(0,), (1,), (0,)]
    with pytest.raises(ConfigError, match=r"backend\.mesh=2 \+ 1: needs 3 devices, and there are 2"):
        allot([2, 1], 2)


def test_every_parameter_of_the_model_declares_its_axes(lab: Any) -> None:
    shape = lab.programs.shape
    named: set[str | None] = set()
    for path, leaf in zip(lab.programs.paths, lab.programs.leaves, strict=True):
        sizes = {"heads": 4, "kv_heads": 2, "d_ff": 384, "vocab": 259}
        axes = axes_of(path, shape).axes
        named.update(axes)
        assert len(axes) == leaf.ndim
        assert all(axis is None or sizes[axis] == size for axis, size in zip(axes, leaf.shape, strict=True))
    assert named == {None, "heads", "kv_heads", "d_ff", "vocab"}
    with pytest.raises(KeyError, match=r"blocks\.bias"):
        axes_of([SimpleNamespace(key="blocks"), SimpleNamespace(key="bias")], shape)


@pytest.mark.parametrize("prefill", SIZES)
def test_blocks_move_between_meshes_of_any_sizes(lab: Any, prefill: int) -> None:
    """Prefill on one mesh, every block moved, decode on a disjoint one. Equal meshes give equal bits, whichever devices
    they are made of; unequal ones move the same bytes, and differ by rounding in what they compute."""
    devices = jax.local_devices()
    prompt = lab.prompt(1, 90)

    async def main():
        source = lab.executor("source", Place(tuple(devices[:prefill])))
        first = await lab.prefill(source, prompt, PREFILL_PAGES)
        blocks = await source.on_thread(lambda: source.read_pages(PREFILL_PAGES))
        kv = await lab.kv(source, PREFILL_PAGES, 90)
        own = await lab.decode(source, first, 90, PREFILL_PAGES, 20)
        own_kv = await lab.kv(source, PREFILL_PAGES, 110)
        found = []
        for decode in SIZES:
            target = lab.executor(f"target{decode}", Place(tuple(devices[-decode:])))
            await target.on_thread(lambda t=target: t.write_pages(DECODE_PAGES, blocks))
            moved = await target.on_thread(lambda t=target: t.read_pages(DECODE_PAGES))
            tokens = await lab.decode(target, first, 90, DECODE_PAGES, 20)
            found.append((decode, moved, tokens, await lab.kv(target, DECODE_PAGES, 110)))
        return blocks, kv, own, own_kv, found

    blocks, kv, own, own_kv, found = lab.run(main)
    assert not np.isnan(kv.view(np.float32)).any()
    for decode, moved, tokens, all_kv in found:
        np.testing.assert_array_equal(moved, blocks)
        np.testing.assert_array_equal(all_kv[:, :, :90], kv)
        if decode == prefill:
            assert tokens == own
            np.testing.assert_array_equal(all_kv, own_kv)
        else:
            agreed = [a == b for a, b in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, own))]
            ours, theirs = (array.view(np.float32)[:, :, 90 : 90 + len(agreed)] for array in (all_kv, own_kv))
            np.testing.assert_allclose(ours, theirs, atol=1e-3, rtol=1e-3)
            assert len(agreed) > 1
