"""Packing and unpacking compiled for devices that are not there, at the sizes of real models."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from mcjax.kernels.kv_pack.blocks import KVBlocks
from mcjax.kernels.kv_pack.dispatch import kv_pack, kv_unpack
from mcjax.kernels.pages import LARGEST, KVPages
from mcjax.kernels.target import Target

SLOTS = 64
MODELS = {  # layers, key heads a device, page, head dim
    "llama-3-8b": (32, 8, 16, 128),
    "llama-3-70b, 4 devices": (80, 2, 16, 128),
    "llama-3-70b, 8 devices": (80, 1, 64, 128),
    "qwen3-32b, 2 devices": (64, 4, 128, 128),
}
DTYPES = [("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("float8_e4m3fn", "bfloat16"), ("int8", "int8")]


def scaled(shape, dtype) -> Any:
    scales = jax.ShapeDtypeStruct(shape[:-1], jnp.float32) if dtype in LARGEST else None
    return jax.ShapeDtypeStruct(shape, dtype), scales


def arguments(model, page_dtype, block_dtype, heads, pages):
    """Of `kv_unpack`; the first two are those of `kv_pack`."""
    layers, kv_heads, page_tokens, head_dim = model
    blocks = scaled((SLOTS, layers, 2, page_tokens, heads, head_dim), block_dtype)
    pool = scaled((pages, layers, 2, kv_heads, page_tokens, head_dim), page_dtype)
    return KVPages(*pool), jax.ShapeDtypeStruct((SLOTS,), jnp.int32), KVBlocks(*blocks)


def operations(hlo: str) -> list[tuple[str, str]]:
    """Of the compiled program, those that take time of their own, with what they result in."""
    entry = hlo[hlo.index("\nENTRY") :]
    free = {"parameter", "bitcast", "tuple", "get-tuple-element", "constant"}
    return [(name, made) for made, name in re.findall(r"= (\S.*?) ([a-z][a-z\-]+)\(", entry) if name not in free]


def copied(hlo: str) -> list[str]:
    """What is copied or computed outside of our kernels, but for what XLA brings from HBM to VMEM by itself."""
    kinds = {"custom-call", "copy-start", "copy-done", "slice-start", "slice-done"}
    return [made for kind, made in operations(hlo) if kind not in kinds]


def tpu_reports(topology, model, page_dtype, block_dtype, first_head, heads, pages, layout="default", out=None):
    from mcjax.kernels.proof.tpu import compile_for_tpu, tpu_topology

    device = tpu_topology(topology).devices[0]
    here = SingleDeviceSharding(device)
    pool, slots, blocks = arguments(model, page_dtype, block_dtype, heads, pages)
    options = {"first_head": first_head, "target": Target("tpu", device.device_kind), "layout": layout}
    formats = pool.formats(here)
    pack = jax.jit(
        partial(kv_pack, heads=heads, dtype=block_dtype, **options), in_shardings=(formats, here), out_shardings=out
    )
    unpack = jax.jit(
        partial(kv_unpack, **options),
        in_shardings=(formats, here, jax.tree.map(lambda _: here, blocks)),
        out_shardings=formats,
        donate_argnums=0,
    )
    return (
        compile_for_tpu(pack, pool, slots, topology=topology),
        compile_for_tpu(unpack, pool, slots, blocks, topology=topology),
    )


@pytest.mark.aot_tpu
@pytest.mark.parametrize(
    ("topology", "model", "page_dtype", "block_dtype"),
    [
        (("v5e:2x2", "v6e:2x2")[(one + other) % 2], model, *dtypes)
        for one, model in enumerate(MODELS)
        for other, dtypes in enumerate(DTYPES)
    ],
)
def test_a_tpu_runs_the_kernels_and_copies_no_pages_or_blocks(topology, model, page_dtype, block_dtype) -> None:
    """Scales of the blocks are copied, which are small. What is unpacked into is the donated memory."""
    layers, kv_heads, page_tokens, head_dim = MODELS[model]
    pages = 2**31 // (layers * 2 * kv_heads * page_tokens * head_dim) + 1  # indices of more than 31 bits
    scales = f"f32[{SLOTS},{layers},2,{page_tokens},{kv_heads}]"
    pack, unpack = tpu_reports(topology, MODELS[model], page_dtype, block_dtype, 0, kv_heads, pages)
    for report in (pack, unpack):
        assert all(made.startswith(scales) for made in copied(report.hlo))
        assert report.temp_bytes <= 2**24
    pool = arguments(MODELS[model], page_dtype, block_dtype, kv_heads, pages)[0]
    assert unpack.alias_bytes >= sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool))


@pytest.mark.aot_tpu
@pytest.mark.parametrize(
    ("head_dim", "page_dtype", "block_dtype", "first_head", "heads"),
    [
        (64, "bfloat16", "bfloat16", 3, 2),
        (64, "int8", "int8", 2, 5),
        (80, "float32", "float8_e4m3fn", 1, 7),
        (96, "bfloat16", "int8", 1, 1),
        (256, "float32", "float32", 1, 3),
    ],
)
def test_a_tpu_takes_any_range_of_heads_of_any_head_dim(head_dim, page_dtype, block_dtype, first_head, heads) -> None:
    for report in tpu_reports("v5e:2x2", (4, 8, 32, head_dim), page_dtype, block_dtype, first_head, heads, 256):
        assert "custom-call" in dict(operations(report.hlo))


@pytest.mark.aot_tpu
def test_where_the_layout_is_free_dma_does_all_of_it() -> None:
    """XLA's transposition is a bitcast where it may choose the layout of the result, and a copy where it may not."""
    from jax.experimental.layout import Format, Layout

    from mcjax.kernels.proof.tpu import tpu_topology

    here = SingleDeviceSharding(tpu_topology("v6e:2x2").devices[0])
    case = ("v6e:2x2", MODELS["llama-3-8b"], "bfloat16", "bfloat16", 2, 4, 1024, "free")
    lying: Any = Format(Layout.AUTO, here)
    chosen = tpu_reports(*case, out=KVBlocks(lying))[0]
    assert copied(chosen.hlo) == []
    assert copied(tpu_reports(*case)[0].hlo)[0].startswith(f"bf16[{SLOTS},32,2,16,4,128]")


@pytest.mark.aot_gpu
@pytest.mark.parametrize(("page_dtype", "block_dtype"), DTYPES)
@pytest.mark.parametrize("model", list(MODELS))
def test_an_h200_runs_one_kernel_that_spills_nothing(model, page_dtype, block_dtype) -> None:
    from mcjax.kernels.proof.gpu import H200, compile_for_gpu

    layers, kv_heads, page_tokens, head_dim = MODELS[model]
    pages = 2**32 // (layers * 2 * kv_heads * page_tokens * head_dim) + 1  # offsets that need 64 bits
    pool, slots, blocks = arguments(MODELS[model], page_dtype, block_dtype, kv_heads, pages)
    pack = compile_for_gpu(partial(kv_pack, dtype=block_dtype, target=H200), pool, slots)
    unpack = compile_for_gpu(partial(kv_unpack, target=H200), pool, slots, blocks, donate_argnums=0)
    for report, name in ((pack, "kv_pack"), (unpack, "kv_unpack")):
        assert [kind for kind, _ in operations(report.hlo)] == ["custom-call"]
        kernel = report.kernel(name)
        assert kernel.stack_bytes == 0
        assert not {"LDL", "STL"} & set(kernel.instructions)
        assert kernel.registers <= 128
    assert unpack.alias_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool))


@pytest.mark.aot_gpu
@pytest.mark.parametrize("head_dim", [80, 256])
@pytest.mark.parametrize(("page_dtype", "block_dtype"), [("bfloat16", "bfloat16"), ("float32", "float8_e4m3fn")])
def test_an_h200_takes_any_head_dim_and_pages_of_any_length(head_dim, page_dtype, block_dtype) -> None:
    from mcjax.kernels.proof.gpu import H200, compile_for_gpu

    pool, slots, blocks = arguments((4, 7, 48, head_dim), page_dtype, block_dtype, 5, 256)
    pack = compile_for_gpu(partial(kv_pack, first_head=2, heads=5, dtype=block_dtype, target=H200), pool, slots)
    unpack = compile_for_gpu(partial(kv_unpack, first_head=1, target=H200), pool, slots, blocks, donate_argnums=0)
    assert pack.kernel("kv_pack").stack_bytes == unpack.kernel("kv_unpack").stack_bytes == 0
