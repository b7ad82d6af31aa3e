"""What is read from machine code, of kernels that are known to use it; and how the compiler's refusals read."""

from __future__ import annotations

import functools
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from mcjax.errors import CompileFailed, KernelRefused, MissingExtra
from mcjax.kernels.proof import executable, gpu


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@functools.cache
def product(rows: int, columns: int, inner: int, warps: int) -> gpu.GpuReport:
    """A matrix product in one block."""

    def body(left, right, out):
        out[...] = jnp.dot(left[...], right[...], preferred_element_type=jnp.float32)

    call = pl.pallas_call(
        body,
        out_shape=struct(rows, columns, dtype=jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=1),
        name="product",
    )
    return gpu.compile_for_gpu(call, struct(rows, inner), struct(inner, columns))


def elementwise(body, shape):
    return pl.pallas_call(
        body, out_shape=struct(*shape), compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1)
    )


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is not None, reason="jax's CUDA plugin is there")
def test_without_the_plugin_the_extra_is_named() -> None:
    with pytest.raises(MissingExtra, match=r"jax_cuda13_plugin.*mcjax\[aot-gpu\]"):
        gpu.compile_for_gpu(jnp.sin, struct(8))


@pytest.mark.aot_gpu
def test_wgmma_is_found_where_a_warpgroup_multiplies_and_not_where_a_warp_does() -> None:
    by_warpgroup = product(64, 128, 128, 4).kernel("product")
    assert by_warpgroup.has_wgmma
    assert by_warpgroup.instructions["HGMMA"] == 128 // 16  # one for each 64 x 128 x 16
    by_warp = product(16, 128, 128, 4).kernel("product")
    assert not by_warp.has_wgmma
    assert by_warp.instructions["HMMA"] == 128 * 128 // (8 * 16) // 4  # each warp's share of 16 x 8 x 16
    assert by_warp.threads == by_warpgroup.threads == 128


@pytest.mark.aot_gpu
def test_spills_are_found_where_there_cannot_be_registers_enough() -> None:
    crowded = product(64, 256, 32, 1).kernel("product")  # a thread holds 512 sums and has 255 registers
    assert crowded.spills > 0
    assert crowded.stack_bytes >= (64 * 256 // 32 - 255) * 4
    assert crowded.registers <= 255
    roomy = product(64, 128, 128, 4).kernel("product")
    assert (roomy.spills, roomy.stack_bytes) == (0, 0)
    assert 64 * 128 // 128 <= roomy.registers <= 255  # at least its sums


@pytest.mark.aot_gpu
def test_shared_memory_is_what_the_operands_of_wgmma_take() -> None:
    kernel = product(64, 128, 128, 4).kernel("product")
    assert kernel.dynamic_shared_bytes == (64 * 128 + 128 * 128) * 2
    assert kernel.shared_bytes == kernel.dynamic_shared_bytes + kernel.static_shared_bytes


@pytest.mark.aot_gpu
def test_what_the_compiler_refuses_is_told_readably() -> None:
    with pytest.raises(CompileFailed, match=r"NVIDIA H200, shared: a block needs \d+ bytes, 232448 are there"):
        product(256, 256, 1024, 8)
    with pytest.raises(CompileFailed, match=r"unsupported: .*sort"):
        gpu.compile_for_gpu(elementwise(lambda x, out: out.__setitem__(..., jnp.sort(x[...])), (64,)), struct(64))
    with pytest.raises(CompileFailed, match="power of 2"):
        gpu.compile_for_gpu(elementwise(lambda x, out: out.__setitem__(..., x[...] + 1), (65,)), struct(65))


@pytest.mark.aot_gpu
def test_a_kernels_own_refusal_is_passed_on() -> None:
    def refuses(x):
        raise KernelRefused("decode", "odd", "make it even")

    with pytest.raises(KernelRefused):
        gpu.compile_for_gpu(refuses, struct(8))


@pytest.mark.aot_gpu
def test_xlas_own_kernels_are_reported_too_and_a_name_must_be_one_kernels() -> None:
    report = gpu.compile_for_gpu(lambda a, b: jnp.tanh(a @ b).sum(axis=-1), struct(512, 512), struct(512, 512))
    assert len(report.kernels) >= 2
    assert (report.argument_bytes, report.output_bytes) == (2 * 512 * 512 * 2, 512 * 2)
    with pytest.raises(LookupError, match=f"0 kernels have 'nobody' in their name, of: {report.kernels[0].name}"):
        report.kernel("nobody")


@pytest.mark.parametrize(
    ("packed", "plain"),
    [
        (b"\x05\x10hello", b"hello"),
        (b"\x0a\x04ab\x11\x02", b"ab" * 5),  # a copy that overlaps what it makes
        (b"\x46\xf0\x3f" + b"x" * 64 + b"\x16\x40\x00", b"x" * 70),
    ],
)
def test_snappy(packed, plain) -> None:
    assert executable.snappy_decoded(packed) == plain


def test_what_is_no_executable_is_refused() -> None:
    with pytest.raises(ValueError, match="Riegeli"):
        list(executable.cubins(b"\x7fELF and more"))
