"""GGUF of every architecture: the shape from the metadata alone, and each weight where it belongs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf_families as families
import numpy as np
import pytest

import family_cases
from mcjax.cost.model_shape import ModelShape
from mcjax.cost.parameters import parameters
from mcjax.errors import ConfigError
from mcjax.models import gguf_shape
from mcjax.models.gguf_file import GGUFFile
from mcjax.models.gguf_weights import GGUFWeights
from mcjax.models.pieces import joined, pieces


def made(folder: Path, case: str, older: bool = False, **metadata: Any) -> tuple[ModelShape, Path]:
    """The shape that a config of transformers says, and a file of it."""
    config, architecture = family_cases.CONFIGS[case], families.ARCHITECTURES[case]
    shape = ModelShape.from_hugging_face(config)
    said = families.metadata(config, architecture, older) | metadata
    arrays = families.tensors(shape, architecture, older)
    return shape, families.write(folder / f"{case}.gguf", architecture, said, arrays)


@pytest.mark.parametrize("case", families.ARCHITECTURES)
def test_the_shape_is_read_from_the_file_alone(tmp_path: Path, case: str) -> None:
    shape, path = made(tmp_path, case)
    found = gguf_shape.read(str(path))
    assert found.checkpoint == str(path)
    assert found.dtype == "float32"
    wanted = shape
    if families.ARCHITECTURES[case].startswith("gemma"):  # the format does not say how scores are scaled
        assert shape.query_scale != 0
        wanted = dataclasses.replace(shape, query_scale=0.0)
    assert found.identity() == wanted.identity()


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("case", families.ARCHITECTURES)
def test_every_weight_arrives_where_it_belongs(tmp_path: Path, case: str, older: bool) -> None:
    shape, path = made(tmp_path, case, older)
    source, given = GGUFWeights(GGUFFile(path), shape), families.weights(shape)
    for name, parameter in parameters(shape).items():
        wanted = joined(name, parameter, [given[piece.name] for piece in pieces(name, parameter)])
        exact = not (name.endswith("gain") and shape.unit_offset_norms)  # those had one added, and taken off again
        np.testing.assert_allclose(np.asarray(source(name, parameter)), wanted, 0, 0 if exact else 2e-7, err_msg=name)


def test_rotary_factors_of_llama_3_1_are_its_scaling(tmp_path: Path) -> None:
    config = family_cases.CONFIGS["llama"]
    scaling = {"factor": 8.0, **gguf_shape.LLAMA3}
    shape = ModelShape.from_hugging_face(config | family_cases.rope(5e5, rope_type="llama3", **scaling))
    said = families.metadata(config, "llama") | {"llama.rope.freq_base": 5e5}
    arrays = families.tensors(shape, "llama")
    dim = shape.head_dim
    wavelengths = 2 * np.pi * 5e5 ** (np.arange(0, dim, 2) / dim)
    smooth = (8192 / wavelengths - 1) / 3
    factors = np.where(wavelengths < 2048, 1, np.where(wavelengths > 8192, 8, 1 / ((1 - smooth) / 8 + smooth)))
    arrays["rope_freqs.weight"] = factors.astype(np.float32)
    path = families.write(tmp_path / "a.gguf", "llama", said, arrays)
    assert gguf_shape.read(str(path)).identity() == shape.identity()
    GGUFWeights(GGUFFile(path), shape)
    with pytest.raises(ConfigError, match=r"model\.rope\.scaling=none.*has llama3"):
        GGUFWeights(GGUFFile(path), dataclasses.replace(shape, rope=None))
    arrays["rope_freqs.weight"][1] *= 1.5
    with pytest.raises(ConfigError, match=r"b\.gguf: its rope_freqs\.weight are not"):
        gguf_shape.read(str(families.write(tmp_path / "b.gguf", "llama", said, arrays)))


@pytest.mark.parametrize(
    ("case", "field", "changes"),
    [
        ("qwen2", "rope.theta", {"rope_theta": 3.0}),
        ("qwen3_moe", "experts_per_token", {"experts_per_token": 3}),
        ("gemma2", "attention_soft_cap", {"attention_soft_cap": 6.0}),
        ("gemma3", "layer_windows", {"layer_windows": ()}),
        ("deepseek_v3", "latent.kv_rank", {}),
        ("deepseek_v3", "routing.groups", {}),
    ],
)
def test_a_shape_that_differs_is_refused_by_field(
    tmp_path: Path, case: str, field: str, changes: dict[str, Any]
) -> None:
    shape, path = made(tmp_path, case)
    if field == "latent.kv_rank" and shape.latent:
        changes = {"latent": dataclasses.replace(shape.latent, kv_rank=10)}
    if field == "routing.groups":
        changes = {"routing": dataclasses.replace(shape.routing, groups=2)}
    with pytest.raises(ConfigError, match=rf"model\.{field}=.*{case}\.gguf has"):
        GGUFWeights(GGUFFile(path), dataclasses.replace(shape, **changes))


def test_what_the_format_leaves_out_may_be_said_elsewhere(tmp_path: Path) -> None:
    shape, path = made(tmp_path, "mistral-full")
    GGUFWeights(GGUFFile(path), dataclasses.replace(shape, layer_windows=(9,) * shape.layers))
    shape, path = made(tmp_path, "deepseek_v3", older=True)
    assert shape.routing.groups == 4
    GGUFWeights(GGUFFile(path), shape)


@pytest.mark.parametrize(
    ("case", "metadata", "message"),
    [
        ("deepseek_v3", {"deepseek2.expert_gating_func": 1}, "softmax, as DeepSeek-V2"),
        ("deepseek_v3", {"deepseek2.nextn_predict_layers": 1}, "predict further tokens"),
        ("qwen3_moe", {"qwen3moe.expert_count": "8"}, r"qwen3moe\.expert_count is of type str"),
        ("gemma3", {"gemma3.block_count": 0}, "make no shape"),
    ],
)
def test_metadata_that_cannot_be_ours_is_named(
    tmp_path: Path, case: str, metadata: dict[str, Any], message: str
) -> None:
    _, path = made(tmp_path, case, **metadata)
    with pytest.raises(ConfigError, match=rf"{case}\.gguf.*{message}"):
        gguf_shape.read(str(path))
