"""The TPU's prefill compiled for TPUs that are not there: real models' shapes fit, and pages are never copied."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from mcjax.errors import CompileFailed, KernelRefused
from mcjax.kernels.pages import LARGEST, KVPages
from mcjax.kernels.prefill import dispatch, tpu, tpu_plan
from mcjax.kernels.proof.tpu import TpuReport, compile_for_tpu, tpu_topology
from mcjax.kernels.target import Target
from mcjax.kernels.vmem import vmem_bytes

pytestmark = pytest.mark.aot_tpu

MODELS = {"llama3-8b": (32, 8), "llama3-70b": (64, 8), "llama3-70b, one of eight": (8, 1), "qwen3-32b": (64, 8)}
"""Query and key heads; all have heads of 128."""

TOKENS = 8192


def compiled(
    topology: str = "v6e:2x2",
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    page: int = 64,
    context: int = 8192,
    dtype: str = "bfloat16",
    kv_dtype: str = "",
    sequences: int = 4,
    body=dispatch.prefill,
    **options,
) -> TpuReport:
    """A call of 8,192 new tokens over pages of 2**18 tokens of two layers."""
    kv_dtype = kv_dtype or dtype
    device = tpu_topology(topology).devices[0]
    one = SingleDeviceSharding(device)
    data = jax.ShapeDtypeStruct((2**18 // page, 2, 2, heads[1], page, head_dim), kv_dtype)
    scales = jax.ShapeDtypeStruct(data.shape[:-1], jnp.float32) if kv_dtype in LARGEST else None
    pages = KVPages(data, scales)  # pyright: ignore[reportArgumentType]
    queries, entries = (jax.ShapeDtypeStruct((TOKENS, count, head_dim), dtype) for count in heads)
    table = jax.ShapeDtypeStruct((sequences, context // page), jnp.int32)
    number = jax.ShapeDtypeStruct((sequences,), jnp.int32)
    lying = pages.formats(one)
    call = functools.partial(body, target=Target("tpu", device.device_kind), **options)
    jitted = jax.jit(
        lambda queries, keys, values, pages, *rest: call(queries, keys, values, pages, 1, *rest),
        donate_argnums=3,
        in_shardings=(one, one, one, lying, one, one, one, one),
        out_shardings=(one, lying),
    )
    report = compile_for_tpu(jitted, queries, entries, entries, pages, table, number, number, number, topology=topology)
    assert report.alias_bytes >= sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pages))
    for leaf in jax.tree.leaves(pages):  # none of them is copied, neither the numbers nor their scales
        shape = ",".join(map(str, leaf.shape))
        assert not re.search(rf"\w+\[{shape}\]\S* copy\(", report.hlo)
    return report


@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize(("model", "context"), [("llama3-8b", 8192), ("qwen3-32b", 131072)])
def test_real_models_fit(topology, kv_dtype, model, context) -> None:
    compiled(topology, MODELS[model], kv_dtype=kv_dtype, context=context)


@pytest.mark.parametrize(
    ("topology", "kv_dtype", "context"),
    [("v5e:2x2", "bfloat16", 131072), ("v6e:2x2", "int8", 131072), ("v5e:2x2", "float8_e4m3fn", 8192)],
)
def test_a_share_of_one_key_head_fits(topology, kv_dtype, context) -> None:
    compiled(topology, MODELS["llama3-70b, one of eight"], kv_dtype=kv_dtype, context=context, page=16)


@pytest.mark.parametrize(
    "shape",
    [
        {"head_dim": 64, "kv_dtype": "int8", "page": 16},
        {"head_dim": 80, "heads": (4, 4), "window": 1024, "page": 128},
        {"head_dim": 96, "heads": (6, 2), "kv_dtype": "float8_e4m3fn", "page": 32},
        {"head_dim": 256, "heads": (8, 4), "soft_cap": 50.0, "page": 256},
        {"heads": (4, 1), "dtype": "float32", "page": 512},
    ],
    ids=lambda shape: f"{shape.get('head_dim', 128)}",
)
def test_other_shapes_fit(shape) -> None:
    compiled(**shape)


def test_what_is_refused_for_want_of_vmem_is_what_the_compiler_refuses(monkeypatch) -> None:
    just: dict[str, Any] = {"body": tpu.prefill, "query_tokens": 512, "key_tokens": 4096, "tile_tokens": 64}
    compiled(**just)  # 105 of 128 MiB
    over: dict[str, Any] = {**just, "query_tokens": 1024}
    with pytest.raises(KernelRefused, match="bytes of VMEM"):
        compiled(**over)
    monkeypatch.setattr(tpu_plan, "require_vmem", lambda kernel, parts, target, lower: vmem_bytes(target.kind))
    with pytest.raises(CompileFailed) as failed:
        compiled(**over)
    assert failed.value.cause == "vmem"


def test_what_is_refused_for_want_of_scalar_memory_is_what_the_compiler_refuses(monkeypatch) -> None:
    compiled(sequences=115, context=131072)  # tables of 942,080 bytes
    with pytest.raises(KernelRefused, match="scalar memory"):
        compiled(sequences=128, context=131072)
    monkeypatch.setattr(tpu_plan, "SMEM_BYTES", 2**30)
    with pytest.raises(CompileFailed) as failed:
        compiled(sequences=128, context=131072)
    assert failed.value.cause == "smem"
