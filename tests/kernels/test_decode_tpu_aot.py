"""Decode's body compiled for TPUs that are not there, with `vmem_limit_bytes` as our own budget has it."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mcjax.errors import CompileFailed, KernelRefused
from mcjax.kernels.decode import tpu
from mcjax.kernels.pages import KVPages
from mcjax.kernels.proof.tpu import TpuReport, compile_for_tpu, tpu_topology
from mcjax.kernels.target import Target
from mcjax.kernels.vmem import MIB, VMEM_BYTES

pytestmark = pytest.mark.aot_tpu

CHIPS = ("v5e:2x2", "v6e:2x2")
MODELS = {
    "llama3-8b": (32, 8, 128, 32),
    "llama3-70b and qwen3-32b": (64, 8, 128, 16),  # the same heads; a few layers of theirs
    "llama3-70b, an eighth": (8, 1, 128, 80),
}
"""Query heads, key heads, head dim, layers."""


def compiled(
    chip: str,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    layers: int = 2,
    page: int = 64,
    kv_dtype: str = "bfloat16",
    dtype: str = "bfloat16",
    batch: int = 8,
    width: int = 1,
    table_pages: int = 128,
    pages: int = 1024,
    **options,
) -> TpuReport:
    device = tpu_topology(chip).devices[0]
    mesh = Mesh([device], ("device",))
    sharding = NamedSharding(mesh, PartitionSpec())
    shape = partial(jax.ShapeDtypeStruct, sharding=sharding)
    stored = jax.eval_shape(lambda: KVPages.filled(pages, layers, kv_heads, page, head_dim, kv_dtype))
    whole = re.escape(",".join(map(str, stored.data.shape)))
    stored = jax.tree.map(
        lambda array, form: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=form),
        stored,
        stored.formats(sharding),
    )

    def decode(queries, pages, layer, table, contexts, lengths, firsts):
        target = Target("tpu", device.device_kind)
        return tpu.decode(queries, pages, layer, table, contexts, lengths, firsts, target=target, **options)

    rows = shape((batch,), jnp.int32)
    queries, table = shape((batch, width, heads, head_dim), dtype), shape((batch, table_pages), jnp.int32)
    report = compile_for_tpu(decode, queries, stored, shape((), jnp.int32), table, rows, rows, rows, mesh=mesh)
    assert not re.search(rf"\w+\[{whole}\]\S* copy", report.hlo)  # of all pages, at every call
    return report


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize(("batch", "context"), [(32, 8 << 10), (2, 128 << 10)])
@pytest.mark.parametrize("model", MODELS)
def test_the_shapes_of_real_models_compile(model, batch, context, kv_dtype, chip) -> None:
    heads, kv_heads, head_dim, layers = MODELS[model]
    page, gigabytes = 64, 8
    token_bytes = layers * 2 * kv_heads * (head_dim * jnp.dtype(kv_dtype).itemsize + 4)
    report = compiled(
        chip,
        heads,
        kv_heads,
        head_dim,
        layers,
        page,
        kv_dtype,
        batch=batch,
        table_pages=context // page,
        pages=gigabytes * 10**9 // token_bytes // page,  # more than 2**31 numbers
    )
    assert report.temp_bytes < 16 * MIB


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    "case",
    [
        {
            "head_dim": 64,
            "page": 16,
            "batch": 256,
            "table_pages": 8192,
        },  # a table too large for scalar memory as a whole
        {"head_dim": 80, "page": 512, "window": 1000},
        {"head_dim": 96, "page": 32, "kv_dtype": "int8", "soft_cap": 30.0},
        {"head_dim": 256, "page": 128, "kv_dtype": "float8_e4m3fn", "width": 4},
        {"dtype": "float32", "kv_dtype": "float32", "width": 3},
        {"heads": 32, "kv_heads": 32, "width": 4, "kv_dtype": "int8", "page": 16},
        {"heads": 64, "kv_heads": 1, "width": 4, "page": 256, "splits": 4, "window": 4096, "soft_cap": 50.0},
    ],
    ids=str,
)
def test_the_corners_compile(case, chip) -> None:
    assert compiled(chip, **case).temp_bytes < 16 * MIB


LARGE: dict[str, Any] = {"heads": 64, "kv_heads": 64, "page": 128, "pages": 64, "table_pages": 32}
"""A page has 4 MiB, and two of each block are in VMEM."""


@pytest.mark.parametrize(("chip", "fits", "refused"), [("v5e:2x2", 14, 16), ("v6e:2x2", 14, 16), ("tpu7x:2x2x1", 6, 8)])
def test_our_budget_refuses_before_the_compiler_does_and_not_long_before(chip, fits, refused, monkeypatch) -> None:
    kind = tpu_topology(chip).devices[0].device_kind
    compiled(chip, **LARGE, block_pages=fits)
    with pytest.raises(KernelRefused, match=rf"{kind} has {VMEM_BYTES[kind]:,}.*lower block_pages"):
        compiled(chip, **LARGE, block_pages=refused)
    monkeypatch.setattr(tpu, "require_vmem", lambda *_: VMEM_BYTES[kind])
    with pytest.raises(CompileFailed, match="vmem"):
        compiled(chip, **LARGE, block_pages=refused)
