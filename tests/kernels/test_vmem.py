"""The budget of VMEM that TPU kernels refuse by."""

from __future__ import annotations

import pytest

from mcjax.errors import KernelRefused
from mcjax.kernels.target import Target
from mcjax.kernels.vmem import MIB, require_vmem, tiled_bytes, vmem_bytes


@pytest.mark.parametrize(
    ("shape", "dtype", "padded"),
    [
        ((8, 128), "float32", 8 * 128 * 4),
        ((3, 1, 1), "float32", 3 * 8 * 128 * 4),
        ((2, 16, 80), "bfloat16", 2 * 16 * 128 * 2),
        ((17, 130), "bfloat16", 32 * 256 * 2),
        ((16, 64), "int8", 32 * 128),
        ((5,), "float8_e4m3fn", 32 * 128),
    ],
)
def test_an_array_is_padded_to_tiles(shape, dtype, padded) -> None:
    assert tiled_bytes(shape, dtype) == padded


def test_a_refusal_says_what_is_needed_what_there_is_and_what_to_lower() -> None:
    parts = {"pages": 100 * MIB, "scores": 20 * MIB}
    assert require_vmem("decode", parts, Target("tpu", "TPU v6 lite"), "block_tokens") == 120 * MIB
    with pytest.raises(KernelRefused) as refused:
        require_vmem("decode", parts, Target("tpu", "TPU7x"), "block_tokens")
    for said in ("kernel decode", "125,829,120", "67,108,864", "TPU7x", "pages 104,857,600", "lower block_tokens"):
        assert said in str(refused.value)
    assert require_vmem("decode", parts, Target("tpu", interpret=True), "block_tokens") == 120 * MIB


def test_a_kind_that_nobody_listed_has_the_least() -> None:
    assert vmem_bytes("TPU v99") == 16 * MIB
    with pytest.raises(KernelRefused, match="'TPU v99' \\(not a known kind\\)"):
        require_vmem("decode", {"pages": 17 * MIB}, Target("tpu", "TPU v99"), "block_tokens")
