"""What `gpu_kernels.py` times and checks: calls at sizes that are served, the most telling ones first."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from mcjax.cost.kernel_cases import KernelCase

MCJAX, TRITON, MOSAIC = "mcjax", "mcjax triton", "mcjax mosaic"
"""What the dispatch picks, and bodies by name."""
REFERENCE = "mcjax reference"
"""The definition, compiled by XLA."""
CUDNN, JAX_PAGED, JAX_MOSAIC = "cudnn", "jax paged_attention", "jax attention_mgpu"


@dataclass(frozen=True)
class Timed:
    """A call to time, by whom."""

    case: KernelCase
    implementations: tuple[str, ...]


@dataclass(frozen=True)
class Checked:
    """A call whose numbers are compared with the reference's on the same device."""

    case: KernelCase
    implementations: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    """`soft_cap` as a number; a packing's `first_head` and `heads`."""


@dataclass(frozen=True)
class Plan:
    timed: tuple[Timed, ...]
    checked: tuple[Checked, ...]
    copy_bytes: int
    """Of the array that measures copy bandwidth."""
    matmul: int
    """Side of the square matrices that measure the peak."""
    rotate_bytes: int
    """Inputs go round through no less, so that no cache holds what a call reads."""
    program_s: float
    """How long one timed program is to run, if a kernel is as fast as the hardware's peaks allow."""
    rounds: int
    matmul_dtype: str = "bfloat16"


SHAPE: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128, "page_tokens": 64}
"""Llama-3-8B, whole on one device."""


def decode_case(batch: int, context: int, query_tokens: int = 1, **more: Any) -> KernelCase:
    return KernelCase("decode", sequences=((batch, context, query_tokens),), **{**SHAPE, **more})


def prefill_case(prefix: int, new: int, **more: Any) -> KernelCase:
    return KernelCase("prefill", sequences=((1, prefix, new),), **{**SHAPE, **more})


def packing_case(kernel: Any, pages: int, **more: Any) -> KernelCase:
    return KernelCase(kernel, pages=pages, **{**SHAPE, "layers": 32, **more})


def full() -> Plan:
    """For an H200: under six minutes in all."""
    prefills = [prefill_case(0, 16_384), prefill_case(0, 8192), prefill_case(30_720, 2048)]
    packings = [packing_case("kv_pack", 128), packing_case("kv_unpack", 128)]
    converted = [packing_case("kv_pack", 128, block_dtype="int8"), packing_case("kv_unpack", 128, block_dtype="int8")]
    ours = (MCJAX, TRITON, MOSAIC)
    timed = [
        Timed(decode_case(32, 16_384), (MCJAX, JAX_PAGED, CUDNN)),
        Timed(prefills[0], (*ours, CUDNN, JAX_MOSAIC)),
        *(Timed(case, (MCJAX,)) for case in packings),
        Timed(prefills[1], (*ours, CUDNN, JAX_MOSAIC)),
        Timed(prefills[2], ours),
    ]
    for context in (4096, 16_384, 65_536):
        for batch in (1, 8, 32, 64, 128):
            peers = (JAX_PAGED, CUDNN) if batch in (1, 128) and context < 65_536 else ()
            if (batch, context) != (32, 16_384):
                timed.append(Timed(decode_case(batch, context), (MCJAX, *peers)))
    timed += [Timed(decode_case(32, 16_384, kv_dtype=dtype), (MCJAX,)) for dtype in ("int8", "float8_e4m3fn")]
    timed += [Timed(case, (MCJAX,)) for case in converted]
    timed += [Timed(prefill_case(0, 16_384, kv_dtype="int8"), (MCJAX,))]
    checked = [
        Checked(decode_case(16, 16_384), (MCJAX,)),
        Checked(prefills[0], ours),
        Checked(prefills[2], ours),
        *(Checked(case, (MCJAX,)) for case in [*packings, *converted]),
        *(Checked(decode_case(8, 16_384, 4, kv_dtype=dtype), (MCJAX,)) for dtype in ("int8", "float8_e4m3fn")),
        *(Checked(prefill_case(4096, 4096, kv_dtype=dtype), (MCJAX, TRITON)) for dtype in ("int8", "float8_e4m3fn")),
        Checked(decode_case(8, 65_536, window=4096), (MCJAX,)),
        Checked(prefill_case(4096, 8192, window=4096, soft_cap=True), ours, {"soft_cap": 30.0}),
        Checked(decode_case(8, 8192, head_dim=64), (MCJAX,)),
        Checked(decode_case(8, 8192, head_dim=256, heads=16, kv_heads=2), (MCJAX,)),
        Checked(prefill_case(1000, 5000, dtype="float32", kv_dtype="float32", head_dim=96), (MCJAX, TRITON)),
        Checked(packing_case("kv_pack", 64), (MCJAX,), {"first_head": 2, "heads": 3}),
        Checked(packing_case("kv_unpack", 64), (MCJAX,), {"first_head": 2, "heads": 3}),
    ]
    return Plan(tuple(timed), tuple(checked), 1 << 31, 8192, 1 << 28, 0.02, 7)


def quick() -> Plan:
    """Every path of the script, at sizes that an interpreter manages."""
    small: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64, "page_tokens": 16}
    decode, prefill, chunk = decode_case(2, 40, **small), prefill_case(0, 48, **small), prefill_case(24, 20, **small)
    pack, unpack = (packing_case(name, 2, **{**small, "layers": 2}) for name in ("kv_pack", "kv_unpack"))
    timed = (
        Timed(decode, (MCJAX, JAX_PAGED, CUDNN)),
        Timed(prefill, (MCJAX, CUDNN, JAX_MOSAIC)),
        Timed(chunk, (MOSAIC, CUDNN)),
        Timed(pack, (MCJAX,)),
        Timed(unpack, (MCJAX,)),
    )
    part: dict[str, Any] = {"first_head": 1, "heads": 1}
    checked = (
        Checked(prefill, (MOSAIC,)),
        Checked(replace(chunk, window=9, soft_cap=True, kv_dtype="int8"), (MCJAX,), {"soft_cap": 30.0}),
        Checked(replace(decode, sequences=((2, 40, 3),), kv_dtype="float8_e4m3fn"), (MCJAX,)),
        Checked(replace(pack, block_dtype="int8"), (MCJAX,), part),
        Checked(replace(unpack, block_dtype="int8"), (MCJAX,), part),
    )
    return Plan(timed, checked, 1 << 12, 32, 1, 0.0, 2)


def on_cpu() -> Plan:
    """The built-in model's shapes, as `mcjax kernels context_tokens=1024 batch=8` has them."""
    shape: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 32, "page_tokens": 64}
    shape |= {"dtype": "float32", "kv_dtype": "float32"}
    cases = [prefill_case(0, 1024, **shape), decode_case(8, 1024, **shape)]
    cases += [packing_case(name, 16, **{**shape, "layers": 4}) for name in ("kv_pack", "kv_unpack")]
    timed = tuple(Timed(case, (REFERENCE,)) for case in cases)
    return Plan(timed, (), 1 << 28, 1024, 1 << 26, 0.05, 5, "float32")
