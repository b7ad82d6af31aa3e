"""Model directories: every weight where it belongs, on any devices, from any file; each disagreement named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

import directory_fixtures as small
from family_cases import CONFIGS
from mcjax.cost.model_shape import ModelShape
from mcjax.cost.parameters import parameters
from mcjax.errors import ConfigError
from mcjax.models import catalogue
from mcjax.models.hugging_face import Dialect, dialect, stored
from mcjax.models.pieces import joined, pieces, whole
from mcjax.models.safetensors_directory import SafetensorsDirectory

# Before anything here computes.

SERVED = ("llama", "llama-tied", "qwen2", "qwen3", "gemma2", "mixtral", "qwen3_moe", "deepseek_v3", "deepseek_v3-yarn")
LLAMA = CONFIGS["llama"]


def expected(config: dict[str, Any], weights: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """Every parameter, put together whole."""
    shape, sources = small.shape_of(config), stored(small.shape_of(config), dialect(weights))
    found: dict[str, np.ndarray] = {}
    for name, parameter in parameters(shape).items():
        parts = [sources[piece.name].read(weights.__getitem__) for piece in pieces(name, parameter)]
        found[name] = joined(name, parameter, parts).astype(jnp.dtype(dtype))
    return found


def spread_over(axes: tuple[str | None, ...], sizes: tuple[int, ...]) -> PartitionSpec:
    """Key heads over `tensor`, experts over `group`, one other axis over what is left."""
    free = ["tensor", "group"]
    spec: list[Any] = [None] * len(axes)
    for place, (axis, size) in enumerate(zip(axes, sizes)):
        if axis == "kv_heads":
            spec[place] = "tensor"
        elif axis == "experts":
            spec[place] = free.pop()
        elif axis and size % 4 == 0:
            spec[place] = tuple(free)
    return PartitionSpec(*spec)


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write(tmp_path_factory.mktemp("good"), LLAMA)


@pytest.mark.parametrize("family", SERVED)
def test_every_parameter_arrives_on_every_device(tmp_path: Path, family: str) -> None:
    config = CONFIGS[family]
    spoken = Dialect(experts="mixtral") if family == "mixtral" else Dialect()
    weights = small.tensors(config, spoken)
    shape = small.shape_of(config, small.write(tmp_path, config, weights, files=3))
    wanted = expected(config, weights, "float32")
    source: Any = catalogue.source(shape)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("tensor", "group"), axis_types=(AxisType.Auto,) * 2)
    for name, parameter in parameters(shape).items():
        whole = source(name, parameter)
        np.testing.assert_array_equal(np.asarray(whole), wanted[name], name)
        spread = spread_over(parameter.axes, parameter.shape)
        shared = source(name, parameter, NamedSharding(mesh, spread))
        assert shared.sharding.spec == spread
        for shard in shared.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), wanted[name][shard.index], name)


def test_experts_in_one_tensor_as_in_many(tmp_path: Path) -> None:
    config = CONFIGS["qwen3_moe"]
    weights = small.tensors(config, Dialect(experts="fused"))
    shape = small.shape_of(config, small.write(tmp_path, config, weights))
    source: Any = catalogue.source(shape)
    wanted = expected(config, weights, "float32")
    for name, parameter in parameters(shape).items():
        np.testing.assert_array_equal(np.asarray(source(name, parameter)), wanted[name], name)


@pytest.mark.parametrize("stored_as", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("width", [4, 2])
def test_dtypes_are_converted_once(tmp_path: Path, stored_as: Any, width: int) -> None:
    weights = small.tensors(LLAMA, dtype=stored_as)
    shape = small.shape_of(LLAMA, small.write(tmp_path, LLAMA, weights), dtype_bytes=width)
    source: Any = catalogue.source(shape)
    for name, wanted in expected(LLAMA, weights, shape.dtype).items():
        found = source(name, parameters(shape)[name])
        assert found.dtype == jnp.dtype(shape.dtype)
        np.testing.assert_array_equal(np.asarray(found), wanted, name)


def test_equal_files_have_equal_names_wherever_they_lie(good: Path, tmp_path: Path) -> None:
    name = catalogue.fingerprint(small.shape_of(LLAMA, good), 0)
    copy = small.write(tmp_path / "copy", LLAMA)
    assert catalogue.fingerprint(small.shape_of(LLAMA, copy), 1) == name
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "model.safetensors").write_bytes(content)
    assert catalogue.fingerprint(small.shape_of(LLAMA, copy), 0) != name
    assert catalogue.fingerprint(small.shape_of(LLAMA, good, dtype_bytes=2), 0) != name


Change = Callable[[dict[str, np.ndarray]], None]
QUERY = "model.layers.1.self_attn.q_proj.weight"


def without(weights: dict[str, np.ndarray]) -> None:
    del weights[QUERY]


def with_bias(weights: dict[str, np.ndarray]) -> None:
    weights["model.layers.0.self_attn.q_proj.bias"] = np.ones(4, np.float32)


def of_another_shape(weights: dict[str, np.ndarray]) -> None:
    weights[QUERY] = weights[QUERY][:-1]


def quantised(weights: dict[str, np.ndarray]) -> None:
    weights[QUERY] = weights[QUERY].astype(np.int8)


def eight_bit_floats(weights: dict[str, np.ndarray]) -> None:
    weights[QUERY] = weights[QUERY].astype(ml_dtypes.float8_e4m3fn)


def not_a_number(weights: dict[str, np.ndarray]) -> None:
    weights[QUERY][3, 2] = np.nan


def infinite(weights: dict[str, np.ndarray]) -> None:
    weights[QUERY][-1, -1] = -np.inf


def further_layer(weights: dict[str, np.ndarray]) -> None:
    weights["model.layers.3.self_attn.q_proj.weight"] = weights[QUERY]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without, rf"lacks the tensor {QUERY}"),
        (with_bias, r"holds the tensor model\.layers\.0\.self_attn\.q_proj\.bias.*llama of this config has no use"),
        (of_another_shape, rf"{QUERY} is \[95, 48\], and blocks\.1\.attention\.query .*must be \[96, 48\]"),
        (quantised, rf"{QUERY} is of dtype I8; quantised.*allowed: F32, F16, BF16"),
        (eight_bit_floats, rf"{QUERY} is of dtype F8_E4M3"),
        (not_a_number, rf"{QUERY} holds 1 numbers that are NaN or infinite in float32 \(blocks\.1\.attention\.query\)"),
        (infinite, rf"{QUERY} holds 1 numbers"),
        (further_layer, r"model\.layers\.3.*no use: is config\.json of another model"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, change: Change, message: str) -> None:
    weights = small.tensors(LLAMA)
    change(weights)
    path = small.write(tmp_path, LLAMA, weights)
    with pytest.raises(ConfigError, match=message):
        catalogue.load(small.shape_of(LLAMA, path), 0, 8)
    with pytest.raises(ConfigError, match=r"model\.checkpoint="):
        catalogue.load(small.shape_of(LLAMA, path), 0, 8)


def test_numbers_too_large_for_the_dtype_are_refused(tmp_path: Path) -> None:
    weights = small.tensors(LLAMA)
    weights[QUERY][0, 0] = 3.4e38  # rounds up to infinity
    path = small.write(tmp_path, LLAMA, weights)
    with pytest.raises(ConfigError, match=rf"{QUERY} holds 1 numbers that are NaN or infinite in bfloat16"):
        catalogue.load(small.shape_of(LLAMA, path, dtype_bytes=2), 0, 8)


def test_output_weights_beside_tied_embeddings(tmp_path: Path) -> None:
    config = CONFIGS["llama-tied"]
    weights = small.tensors(config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    catalogue.load(small.shape_of(config, small.write(tmp_path, config, weights)), 0, 8)
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight.*false"):
        catalogue.load(small.shape_of(config, small.write(tmp_path, config, weights)), 0, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 2}, r"model\.layers\.2\..*no use"),
        ({"num_hidden_layers": 4}, r"lacks the tensor model\.layers\.3\."),
        ({"intermediate_size": 96}, r"mlp\.gate_proj\.weight is \[80, 48\].*must be \[96, 48\]"),
        ({"vocab_size": 96}, r"embed_tokens\.weight is \[97, 48\].*must be \[96, 48\]"),
        ({"tie_word_embeddings": True}, r"lm_head\.weight differs"),
        ({"model_type": "qwen3", "mlp_bias": None}, r"lacks the tensor model\.layers\.0\.self_attn\.q_norm\.weight"),
    ],
)  # fmt: skip
def test_a_config_of_another_model(good: Path, change: dict[str, Any], message: str) -> None:
    config = {key: value for key, value in {**LLAMA, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        catalogue.load(small.shape_of(config, good), 0, 8)


def told(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        catalogue.load(small.shape_of(LLAMA, path), 0, 8)
    return str(caught.value)


def test_files_that_are_not_there_or_there_twice(tmp_path: Path) -> None:
    assert "has neither model.safetensors nor model.safetensors.index.json" in told(tmp_path)
    path = small.write(tmp_path, LLAMA, files=3)
    second = path / "model-00002-of-00003.safetensors"
    content = second.read_bytes()
    second.unlink()
    assert "names the file model-00002-of-00003.safetensors, which is not there" in told(path)
    second.write_bytes(content)
    again = load_file(path / "model-00001-of-00003.safetensors")
    save_file({**again, **load_file(second)}, second)
    assert "which is not there" not in told(path)
    assert "model-00002-of-00003.safetensors: has the tensor" in told(path)
    assert "as model-00001-of-00003.safetensors has: one of the two must go" in told(path)
    second.write_bytes(content)
    save_file(again, path / "model.safetensors")
    assert "has model.safetensors beside model.safetensors.index.json" in told(path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "does not hold a JSON object"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": {"a": 1}}', "says of a no file name"),
        ('{"weight_map": {"a": "../model-00001-of-00002.safetensors"}}', "no .safetensors file beside it"),
        ('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}', "and no file has it"),
    ],
)  # fmt: skip
def test_an_index_that_cannot_be_right(tmp_path: Path, index: str, message: str) -> None:
    path = small.write(tmp_path, LLAMA, files=2)
    (path / small.INDEX).write_text(index)
    assert message in told(path)


def test_an_index_that_puts_a_tensor_elsewhere(tmp_path: Path) -> None:
    path = small.write(tmp_path, LLAMA, files=2)
    index = json.loads((path / small.INDEX).read_text())
    other = {f"model-0000{one}-of-00002.safetensors": f"model-0000{3 - one}-of-00002.safetensors" for one in (1, 2)}
    index["weight_map"][QUERY] = other[index["weight_map"][QUERY]]
    (path / small.INDEX).write_text(json.dumps(index))
    assert f"says that the tensor {QUERY} is in" in told(path)


def test_a_snapshot_in_the_cache_of_the_hub(good: Path, tmp_path: Path) -> None:
    """Its files are links to blobs that lie elsewhere."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(good.iterdir())):
        (blobs / str(number)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    shape = ModelShape.read(str(snapshot))
    assert (shape.name, shape.checkpoint) == ("abc", str(snapshot.resolve()))
    assert catalogue.fingerprint(shape, 0) == catalogue.fingerprint(ModelShape.read(str(good)), 0)
    catalogue.load(shape, 0, 8)


def test_a_shard_reads_its_own_experts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS["qwen3_moe"]
    shape = small.shape_of(config, small.write(tmp_path, config))
    read: list[str] = []
    tensor = SafetensorsDirectory.tensor

    def noted(directory: SafetensorsDirectory, name: str) -> Any:
        read.append(name)
        return tensor(directory, name)

    monkeypatch.setattr(SafetensorsDirectory, "tensor", noted)
    source: Any = catalogue.source(shape)
    name = "blocks.1.feed_forward.gate_up"
    parameter = parameters(shape)[name]
    mesh = Mesh(np.array(jax.devices()[:4]), ("expert",), axis_types=(AxisType.Auto,))
    source(name, parameter, NamedSharding(mesh, PartitionSpec("expert")))
    assert len(read) == len(set(read)) == 2 * parameter.shape[0]
    read.clear()
    _, *inside = whole(parameter.shape)
    source.part(name, parameter, (slice(2, 4), *inside))
    experts = "model.layers.1.mlp.experts."
    assert sorted(read) == sorted(f"{experts}{at}.{part}_proj.weight" for at in (2, 3) for part in ("gate", "up"))
