"""The GPU's decode, compiled for an H200: it fits, nothing spills, and what was designed is in the machine code."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import pytest

from mcjax.kernels.decode import gpu
from mcjax.kernels.decode.gpu_plan import tuned
from mcjax.kernels.pages import KVPages
from mcjax.kernels.proof.gpu import H200, GpuReport, compile_for_gpu, resident_blocks

pytestmark = pytest.mark.aot_gpu

MODELS = {  # query heads, key heads of a device
    "llama-3-8b": (32, 8),
    "llama-3-70b": (64, 8),
    "llama-3-70b of 8": (8, 1),
    "qwen3-32b": (64, 8),
}


@functools.cache
def compiled(
    heads: int,
    kv_heads: int,
    *,
    context: int = 8192,
    batch: int = 32,
    width: int = 1,
    head_dim: int = 128,
    page_tokens: int = 16,
    dtype=jnp.bfloat16,
    kv_dtype=jnp.bfloat16,
    pages_bytes: int = 8 << 30,
    window: int | None = None,
    soft_cap: float | None = None,
    sharded: bool = False,
) -> GpuReport:
    layers = 8
    page_numbers = layers * 2 * kv_heads * page_tokens * head_dim
    pages = pages_bytes // (page_numbers * jnp.dtype(kv_dtype).itemsize)
    stored = jax.eval_shape(lambda: KVPages.filled(pages, layers, kv_heads, page_tokens, head_dim, kv_dtype))

    def step(queries, pages, layer, table, contexts, lengths, firsts=None):
        return gpu.decode(
            queries, pages, layer, table, contexts, lengths, firsts, target=H200, window=window, soft_cap=soft_cap
        )

    queries = jax.ShapeDtypeStruct((batch, width, heads, head_dim), dtype)
    layer, row = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.int32)
    table = jax.ShapeDtypeStruct((batch, math.ceil(context / page_tokens)), jnp.int32)
    rows = (row, row, row) if sharded else (row, row)
    return compile_for_gpu(step, queries, stored, layer, table, *rows)


def check(report: GpuReport, blocks: int, tensor_cores: bool = True) -> None:
    parts = report.kernel("decode_parts")
    assert (parts.spills, parts.stack_bytes) == (0, 0)
    assert parts.instructions["LDGSTS"] > 0  # keys come in the background
    assert tensor_cores == bool(parts.instructions.get("HMMA", 0) + parts.instructions.get("HGMMA", 0))
    assert resident_blocks(parts) * 132 >= blocks  # persistent blocks wait for nobody
    merge = report.kernel("decode_merge")
    assert (merge.spills, merge.stack_bytes) == (0, 0)
    assert len(report.kernels) == 2  # pages, queries and results are used where they are


@pytest.mark.parametrize("page_tokens", [16, 64])
@pytest.mark.parametrize("context", [8192, 131072])
@pytest.mark.parametrize("model", MODELS)
def test_models(model, context, page_tokens) -> None:
    heads, kv_heads = MODELS[model]
    batch = 32 if context == 8192 else 8
    report = compiled(heads, kv_heads, context=context, batch=batch, page_tokens=page_tokens)
    check(report, tuned(H200, 128, jnp.bfloat16, heads // kv_heads).blocks)


@pytest.mark.parametrize("page_tokens", [16, 64, 512])
@pytest.mark.parametrize(("heads", "width"), [(8, 1), (16, 1), (64, 2), (32, 4)])
def test_other_numbers_of_query_vectors(heads, width, page_tokens) -> None:
    """What spills by a register in one case does not in the next: each has blocks of its own."""
    report = compiled(heads, 8, width=width, page_tokens=page_tokens)
    check(report, tuned(H200, 128, jnp.bfloat16, heads // 8 * width).blocks)


@pytest.mark.parametrize("kv_dtype", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_quantised_pages(head_dim, kv_dtype) -> None:
    blocks = tuned(H200, head_dim, kv_dtype, 4).blocks
    check(compiled(32, 8, head_dim=head_dim, kv_dtype=kv_dtype, page_tokens=64), blocks)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 256])
def test_head_dims(head_dim) -> None:
    check(compiled(16, 2, head_dim=head_dim), tuned(H200, head_dim, jnp.bfloat16, 8).blocks)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "head_dim", "kv_dtype"),
    [
        (32, 8, 4, 128, jnp.bfloat16),
        (32, 8, 8, 128, jnp.float8_e4m3fn),
        (64, 8, 8, 128, jnp.bfloat16),
        (64, 8, 8, 128, jnp.int8),
        (64, 8, 16, 128, jnp.bfloat16),  # more vectors than a block takes
        (64, 8, 8, 256, jnp.bfloat16),
    ],
)
def test_several_queries_a_row(heads, kv_heads, width, head_dim, kv_dtype) -> None:
    blocks = tuned(H200, head_dim, kv_dtype, width * heads // kv_heads).blocks
    check(compiled(heads, kv_heads, width=width, head_dim=head_dim, kv_dtype=kv_dtype), blocks)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "kv_dtype"),
    [
        (64, jnp.float32, jnp.float32),
        (128, jnp.float32, jnp.float32),
        (256, jnp.float32, jnp.float32),
        (128, jnp.float32, jnp.bfloat16),
        (128, jnp.float32, jnp.int8),
        (128, jnp.bfloat16, jnp.float32),
    ],
)
def test_float32_is_multiplied_as_such(head_dim, dtype, kv_dtype) -> None:
    report = compiled(32, 8, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype)
    check(report, tuned(H200, head_dim, kv_dtype, 4, jnp.float32).blocks, tensor_cores=False)


def test_each_head_its_own_keys_a_window_and_a_soft_cap_and_odd_pages() -> None:
    report = compiled(8, 8, window=1024, soft_cap=30.0, page_tokens=48)
    check(report, tuned(H200, 128, jnp.bfloat16, 1).blocks)


@pytest.mark.parametrize("pages_bytes", [1 << 30, 3 << 30, 16 << 30])
def test_pages_of_any_size(pages_bytes) -> None:
    check(compiled(32, 8, kv_dtype=jnp.int8, pages_bytes=pages_bytes), tuned(H200, 128, jnp.int8, 4).blocks)


def test_a_shard_of_a_context() -> None:
    check(compiled(8, 1, context=131072, batch=1, sharded=True), tuned(H200, 128, jnp.bfloat16, 8).blocks)
