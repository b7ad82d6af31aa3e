"""The types of tensors that are read, each to within what its steps allow; and those that are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from mcjax.errors import ConfigError
from mcjax.models.gguf_file import GGUFFile

KINDS = gguf.GGMLQuantizationType
ROWS, WIDTH = 6, 512


def numbers(seed: int = 3) -> np.ndarray:
    """`[ROWS, WIDTH]`; blocks of unlike spread, some around 1 and not 0."""
    random = np.random.default_rng(seed)
    spread = 4.0 ** random.integers(-4, 2, (ROWS, WIDTH // 32, 1))
    values = random.standard_normal((ROWS, WIDTH // 32, 32)) * spread + random.integers(0, 2, (ROWS, WIDTH // 32, 1))
    return values.reshape(ROWS, WIDTH).astype(np.float32)


def read(folder: Path, stored: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    writer = gguf.GGUFWriter(folder / "t.gguf", "llama")
    writer.add_tensor("t", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GGUFFile(folder / "t.gguf").tensor("t")
    assert found.dtype == np.float32
    return found


def blocks(values: np.ndarray, size: int) -> np.ndarray:
    return values.reshape(ROWS, WIDTH // size, size)


def half(values: Any) -> Any:
    """Scales are stored in float16."""
    return values.astype(np.float16).astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "bits"), [(KINDS.F32, 24), (KINDS.F16, 11), (KINDS.BF16, 8)], ids=["f32", "f16", "bf16"]
)
def test_floats(tmp_path: Path, kind: gguf.GGMLQuantizationType, bits: int) -> None:
    values = numbers()
    found = read(tmp_path, gguf.quantize(values, kind), kind)
    wrong = np.abs(found - values)
    assert (wrong <= np.abs(values) * 2.0**-bits + (2.0**-25 if kind == KINDS.F16 else 0)).all()
    assert (wrong.max() == 0) == (kind == KINDS.F32)


def test_q8_0_is_off_by_half_a_step(tmp_path: Path) -> None:
    values = numbers()
    found = read(tmp_path, gguf.quantize(values, KINDS.Q8_0), KINDS.Q8_0)
    step = np.abs(blocks(values, 32)).max(-1, keepdims=True) / 127
    bound = step * (0.5 + 127 * 2.0**-11)  # the scale itself is rounded to float16
    assert (np.abs(blocks(found - values, 32)) <= bound + 1e-7).all()
    assert np.abs(found - values).max() > 0


def test_q4_0_is_off_by_a_step_at_its_far_end(tmp_path: Path) -> None:
    values = numbers()
    found = read(tmp_path, gguf.quantize(values, KINDS.Q4_0), KINDS.Q4_0)
    step = np.abs(blocks(values, 32)).max(-1, keepdims=True) / 8  # -8 to 7 steps: the other sign ends one earlier
    wrong = np.abs(blocks(found - values, 32))
    assert (wrong <= step * (1 + 8 * 2.0**-11) + 1e-7).all()
    assert np.mean(wrong <= step * 0.51) > 0.9


def test_q4_1_is_off_by_half_a_step_of_the_range(tmp_path: Path) -> None:
    values = numbers()
    found = read(tmp_path, gguf.quantize(values, KINDS.Q4_1), KINDS.Q4_1)
    inside = blocks(values, 32)
    low, high = inside.min(-1, keepdims=True), inside.max(-1, keepdims=True)
    bound = (high - low) / 15 * (0.5 + 15 * 2.0**-11) + np.abs(low) * 2.0**-11
    assert (np.abs(blocks(found - values, 32)) <= bound + 1e-7).all()


def q4_k(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of Q4_K and what they stand for, by the layout that ggml-common.h describes (block_q4_K).

    256 numbers: float16 `d` and `dmin`, then 8 scales and 8 minima of 6 bits in 12 bytes, then 128 bytes of 4 bits. A
    number of the sub-block j is `d * scale[j] * q - dmin * minimum[j]`.
    """
    result, meant = [], []
    for block in values.reshape(-1, 8, 32):
        low, high = np.minimum(block.min(1), 0), block.max(1)
        steps, minima = np.maximum(high - low, 0) / 15, -low
        d, dmin = half(np.float32(steps.max() / 63)), half(np.float32(minima.max() / 63))
        scale = np.ceil(steps / d).clip(0, 63).astype(np.uint8) if d else np.zeros(8, np.uint8)
        minimum = np.round(minima / dmin).clip(0, 63).astype(np.uint8) if dmin else np.zeros(8, np.uint8)
        wide, shift = (d * scale)[:, None], (dmin * minimum)[:, None]
        q = np.round((block + shift) / np.where(wide == 0, 1, wide)).clip(0, 15).astype(np.uint8)
        packed = np.zeros(12, np.uint8)
        for j in range(4):  # six whole bits of the first four; of the others four bits here, two above the first
            packed[j] = scale[j] | (scale[j + 4] >> 4) << 6
            packed[j + 4] = minimum[j] | (minimum[j + 4] >> 4) << 6
            packed[j + 8] = (scale[j + 4] & 15) | (minimum[j + 4] & 15) << 4
        nibbles = np.concatenate([q[2 * pair] | q[2 * pair + 1] << 4 for pair in range(4)])
        head = np.array([d, dmin], np.float16).view(np.uint8)
        result.append(np.concatenate([head, packed, nibbles]))
        meant.append(wide * q - shift)
    return np.stack(result).reshape(ROWS, -1), np.stack(meant).reshape(ROWS, WIDTH).astype(np.float32)


def q6_k(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of Q6_K and what they stand for, by ggml-common.h (block_q6_K).

    256 numbers: 128 bytes of low 4 bits, 64 bytes of high 2 bits, 16 signed scales of 8 bits, float16 `d`. A number of
    the sub-block of 16 is `d * scale * (q - 32)`. Each half of 128 numbers lies as four rows of 32, of which the rows 0
    and 2, 1 and 3 share low bytes, and all four share high ones.
    """
    result, meant = [], []
    for block in values.reshape(-1, 16, 16):
        steps = np.abs(block).max(1) / 31
        d = half(np.float32(steps.max() / 127))
        scale = np.ceil(steps / d).clip(-128, 127).astype(np.int8) if d else np.zeros(16, np.int8)
        wide = (d * scale.astype(np.float32))[:, None]
        q = (np.round(block / np.where(wide == 0, 1, wide)).clip(-32, 31) + 32).astype(np.uint8)
        low, high = [], []
        for row in q.reshape(2, 4, 32):
            low += [row[0] & 15 | (row[2] & 15) << 4, row[1] & 15 | (row[3] & 15) << 4]
            high.append(row[0] >> 4 | (row[1] >> 4) << 2 | (row[2] >> 4) << 4 | (row[3] >> 4) << 6)
        tail = [scale.view(np.uint8), np.array([d], np.float16).view(np.uint8)]
        result.append(np.concatenate([*low, *high, *tail]))
        meant.append(wide * (q.astype(np.float32) - 32))
    return np.stack(result).reshape(ROWS, -1), np.stack(meant).reshape(ROWS, WIDTH).astype(np.float32)


def test_q4_k(tmp_path: Path) -> None:
    values = numbers()
    stored, meant = q4_k(values)
    assert stored.shape == (ROWS, WIDTH // 256 * 144)
    found = read(tmp_path, stored, KINDS.Q4_K)
    np.testing.assert_allclose(found, meant, rtol=1e-6, atol=1e-6)
    reach = blocks(values, 256).max(-1) - np.minimum(blocks(values, 256).min(-1), 0)
    # Half a step of 15, and what eight scales and minima share: 63 steps of the largest of them.
    assert (np.abs(blocks(found - values, 256)) <= reach[..., None] * (0.5 / 15 + 1.5 / 63)).all()


def test_q6_k(tmp_path: Path) -> None:
    values = numbers()
    stored, meant = q6_k(values)
    assert stored.shape == (ROWS, WIDTH // 256 * 210)
    found = read(tmp_path, stored, KINDS.Q6_K)
    np.testing.assert_allclose(found, meant, rtol=1e-6, atol=1e-6)
    reach = np.abs(blocks(values, 256)).max(-1)
    assert (np.abs(blocks(found - values, 256)) <= reach[..., None] * (0.5 / 31 + 1 / 127)).all()


def test_other_types_are_named(tmp_path: Path) -> None:
    refused = [kind for kind in KINDS if not readable(kind)]
    assert refused
    for kind in refused:
        with pytest.raises(ConfigError, match=rf"t\.gguf: its tensor t is of type {kind.name}, .* cannot dequantise"):
            read(tmp_path, np.zeros((2, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)


def readable(kind: gguf.GGMLQuantizationType) -> bool:
    try:
        gguf.dequantize(np.zeros((2, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
