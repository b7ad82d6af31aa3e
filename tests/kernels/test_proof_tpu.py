"""The compiler for TPUs that are not there: what it reports, and how it refuses."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mcjax.errors import CompileFailed, ConfigError, KernelRefused, MissingExtra
from mcjax.kernels.proof import tpu

SQUARE = jax.ShapeDtypeStruct((256, 256), jnp.float32)


def doubled(shape, scratch=()):
    """A kernel that doubles one block of `shape`."""

    def body(x_ref, out_ref, *_):
        out_ref[...] = x_ref[...] * 2

    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(shape, jnp.float32), scratch_shapes=scratch)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is there")
def test_without_libtpu_the_extra_is_named() -> None:
    with pytest.raises(MissingExtra, match=r"libtpu.*mcjax\[aot-tpu\]"):
        tpu.compile_for_tpu(jnp.sin, SQUARE)


@pytest.mark.aot_tpu
@pytest.mark.parametrize("topology", tpu.TOPOLOGIES)
def test_a_kernel_is_compiled_and_its_bytes_are_told(topology) -> None:
    report = tpu.compile_for_tpu(doubled(SQUARE.shape), SQUARE, topology=topology)
    assert report.argument_bytes == report.output_bytes == 256 * 256 * 4
    assert report.topology.partition(":")[0].removesuffix("e") in report.device_kind.replace("TPU ", "")
    assert "tpu_custom_call" in report.hlo
    assert report.hbm_bytes >= 2 * 256 * 256 * 4
    donated = tpu.compile_for_tpu(lambda x: x + 1, SQUARE, topology=topology, donate_argnums=0)
    assert donated.alias_bytes == 256 * 256 * 4


@pytest.mark.aot_tpu
def test_a_sharded_program_is_compiled_with_its_collectives() -> None:
    mesh = tpu.tpu_mesh("v6e:2x2", (1, 4), ("data", "model"))
    left = jax.ShapeDtypeStruct((64, 512), jnp.float32, sharding=NamedSharding(mesh, P(None, "model")))
    right = jax.ShapeDtypeStruct((512, 128), jnp.float32, sharding=NamedSharding(mesh, P("model")))
    report = tpu.compile_for_tpu(jax.jit(jnp.matmul), left, right, mesh=mesh)
    assert report.argument_bytes == (64 + 128) * 128 * 4
    assert "all-reduce" in report.hlo


@pytest.mark.aot_tpu
@pytest.mark.parametrize("topology", tpu.TOPOLOGIES)
@pytest.mark.parametrize("cause", ["vmem", "smem", "hbm", "unsupported"])
def test_what_does_not_fit_or_lower_is_refused_by_name(topology, cause) -> None:
    huge = jax.ShapeDtypeStruct((1 << 17, 1 << 16), jnp.float32)
    large = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)

    def sorts(x_ref, out_ref):
        out_ref[...] = jnp.sort(x_ref[...])

    programs = {
        "vmem": (doubled(large.shape), large),
        "smem": (doubled(SQUARE.shape, [pltpu.SMEM((10**7,), jnp.int32)]), SQUARE),
        "hbm": (lambda x: x + 1, huge),
        "unsupported": (pl.pallas_call(sorts, out_shape=SQUARE), SQUARE),
    }
    with pytest.raises(CompileFailed) as caught:
        tpu.compile_for_tpu(*programs[cause], topology=topology)
    assert caught.value.cause == cause
    assert caught.value.target == topology
    assert {"vmem": "268435456 bytes", "smem": "40000000 bytes", "hbm": "64.00G", "unsupported": "sort"}[cause] in str(
        caught.value
    )


@pytest.mark.aot_tpu
def test_a_kernels_own_refusal_passes_and_unknown_topologies_are_refused() -> None:
    def refuses(x):
        raise KernelRefused("doubled", "no such shape", "take another")

    with pytest.raises(KernelRefused, match="take another"):
        tpu.compile_for_tpu(refuses, SQUARE)
    with pytest.raises(ConfigError, match=r"topology=v9:1.*v5e:2x2, v6e:2x2"):
        tpu.tpu_topology("v9:1")
