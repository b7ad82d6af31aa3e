"""The GPU bodies of prefill, compiled for an H200 that is not there, down to machine code."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from mcjax.kernels.pages import LARGEST, KVPages
from mcjax.kernels.prefill import gpu, gpu_mosaic
from mcjax.kernels.proof.gpu import H200, GpuReport, compile_for_gpu

pytestmark = pytest.mark.aot_gpu

MODELS = {"llama-3-8b": (32, 8, 32), "llama-3-70b": (64, 8, 80), "qwen3-32b": (64, 8, 64)}
"""Query heads, key heads, layers; heads of 128."""


def compile_prefill(
    heads: int,
    kv_heads: int,
    layers: int,
    context: int,
    head_dim: int = 128,
    page: int = 64,
    dtype: str = "bfloat16",
    kv_dtype: str = "bfloat16",
    body=gpu.prefill,
    tokens: int = 8192,
    **options,
) -> GpuReport:
    """A chunk of `tokens`, the last of `context`, in as many pages as it takes: more than 2^32 bytes of them."""
    shape = (max(context // page, 2**33 // (layers * 2 * kv_heads * page * head_dim)), layers, 2, kv_heads, page)
    scales = jax.ShapeDtypeStruct(shape, jnp.float32) if kv_dtype in LARGEST else None
    pages = KVPages(jax.ShapeDtypeStruct((*shape, head_dim), kv_dtype), scales)  # type: ignore[arg-type]
    rows = [jax.ShapeDtypeStruct((tokens, count, head_dim), dtype) for count in (heads, kv_heads, kv_heads)]
    batch = [jax.ShapeDtypeStruct(size, jnp.int32) for size in ((), (1, context // page), (1,), (1,), (1,))]
    return compile_for_gpu(functools.partial(body, target=H200, **options), *rows, pages, *batch, donate_argnums=3)


@pytest.mark.parametrize("context", [8192, 131_072])
@pytest.mark.parametrize("model", MODELS)
def test_chunks_of_real_models_run_on_tensor_cores_without_spills(model: str, context: int) -> None:
    report = compile_prefill(*MODELS[model], context)
    attend = report.kernel("prefill_attend")
    assert attend.has_wgmma
    assert attend.spills == 0
    assert attend.instructions["LDGSTS"]  # keys and values arrive while others are computed with
    assert report.kernel("prefill_write").spills == 0
    # The pages are never copied.
    assert report.alias_bytes > 2**33
    assert report.temp_bytes < 2**20


@pytest.mark.parametrize(
    ("head_dim", "page", "kv_dtype"),
    [
        (64, 16, "bfloat16"),
        (80, 512, "int8"),
        (80, 32, "bfloat16"),
        (96, 128, "float8_e4m3fn"),
        (128, 48, "int8"),
        (256, 64, "bfloat16"),
        (256, 16, "float8_e4m3fn"),
    ],
)
def test_other_heads_and_pages_have_no_spills(head_dim: int, page: int, kv_dtype: str) -> None:
    report = compile_prefill(16, 8, 32, 8192, head_dim, page, kv_dtype=kv_dtype, window=1000, soft_cap=50.0)
    assert report.kernel("prefill_attend").has_wgmma
    assert report.kernel("prefill_attend").spills == 0


def test_float32_has_no_spills() -> None:
    report = compile_prefill(16, 8, 32, 8192, dtype="float32", kv_dtype="float32")
    assert report.kernel("prefill_attend").spills == 0


@pytest.mark.parametrize("context", [8192, 131_072])
@pytest.mark.parametrize("model", MODELS)
def test_chunks_of_real_models_by_warpgroups_and_tma(model: str, context: int) -> None:
    report = compile_prefill(*MODELS[model], context, page=128, body=gpu_mosaic.prefill)
    check_hopper(report)
    assert report.alias_bytes > 2**33
    assert report.temp_bytes < 2**20


@pytest.mark.parametrize(
    ("heads", "head_dim", "page", "window"),
    [(8, 64, 64, 1000), (24, 128, 16, 1000), (16, 128, 64, None)],
)
def test_other_heads_and_pages_by_warpgroups_and_tma(heads: int, head_dim: int, page: int, window: int | None) -> None:
    options = {"window": window, "soft_cap": 50.0}
    check_hopper(compile_prefill(heads, 8, 32, 8192, head_dim, page, body=gpu_mosaic.prefill, **options))


def check_hopper(report: GpuReport) -> None:
    attend = report.kernel("prefill_attend")
    assert attend.has_wgmma
    assert attend.spills == 0
    assert attend.instructions["UTMALDG"]
    assert attend.instructions["UTMASTG"]
    assert not attend.instructions["LDGSTS"]
