"""The catalogue, shapes against published counts, formulas against naive sums, and what fits in memory."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcjax.cost import formulas
from mcjax.cost.catalogue import hardware, model, names
from mcjax.cost.hardware import Hardware
from mcjax.cost.memory import activation_bytes, kv_capacity_tokens
from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError
from published_configs import PUBLISHED

LLAMA_70B: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64,
    "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256, "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "rope_theta": 500000.0, "rms_norm_eps": 1e-05,
}  # fmt: skip
MIXTRAL_8X7B: dict[str, Any] = {
    "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 32768, "sliding_window": None, "dtype": "bfloat16",
}  # fmt: skip
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8, "max_position_embeddings": 40960,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "torch_dtype": "bfloat16",
}  # fmt: skip


def test_the_catalogue_reads_and_names_itself() -> None:
    wanted = {"a800x8", "h800x8", "h100x8", "h200x8", "tpu_v5e_8", "tpu_v6e_8", "tpu_v7x_8", "cpu"}
    assert wanted <= set(names("hardware"))
    for name in names("hardware"):
        assert hardware(name).name == name
    for name in ("llama3-70b", "llama3-8b", "qwen3-32b"):
        assert model(name).name == name
    assert model("tiny") == ModelShape(
        "builtin-tiny",
        *(4, 128, 4, 2, 32, 384, 259),
        dtype_bytes=4,
        kv_dtype_bytes=4,
        max_context_tokens=2048,
        checkpoint="package:mcjax/models/trained/tiny",
    )
    with pytest.raises(ConfigError, match=r"hardware=b200x8.*a800x8"):
        hardware("b200x8")


def test_mooncake_figures_of_the_a800_node() -> None:
    node, shape = hardware("a800x8"), model("llama3-70b")
    assert node.total_peak_flops == 8 * 312 * 10**12
    assert shape.kv_bytes_per_token == 327_680  # FAST'25 5.3.1: 320 KB
    assert shape.kv_bytes_per_token * 131_072 == 40 * 2**30  # 40 GB at 128k
    assert node.host_dram_bytes // shape.kv_bytes_per_token == 3_051_757  # 5.4.1: about 3 M tokens
    # 40 GB at 87 GB/s: 0.472 s in FAST'25 Fig 12.
    assert node.transfer_ns(40_000_000_000) / 1e9 == pytest.approx(0.472, rel=0.03)


def test_transfer_time_is_latency_plus_bytes_over_bandwidth() -> None:
    node = replace(hardware("a800x8"), nic_bytes_per_s=3, nic_latency_ns=7, pcie_bytes_per_s=2, pcie_latency_ns=1)
    assert node.transfer_ns(0) == 7
    assert node.transfer_ns(1) == 7 + 333_333_334  # rounded up
    assert node.transfer_ns(4, "pcie") == 1 + 2_000_000_000
    with pytest.raises(ConfigError, match=r"hardware\.ssd_bytes_per_s=0.*a800x8 has none"):
        node.transfer_ns(1, "ssd")
    assert replace(node, ssd_bytes_per_s=4, ssd_latency_ns=9).transfer_ns(1, "ssd") == 9 + 250_000_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 0}, r"hardware\.count=0"),
        ({"hbm_bytes": 1.5}, r"hardware\.hbm_bytes=1\.5"),
        ({"nic_latency_ns": -1}, r"hardware\.nic_latency_ns=-1"),
        ({"ssd_bytes_per_s": -1}, r"hardware\.ssd_bytes_per_s=-1"),
        ({"interconnect_bytes_per_s": 0}, "need an interconnect"),
    ],
)
def test_hardware_mistakes_name_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(hardware("a800x8"), **changes)
    assert isinstance(replace(hardware("a800x8"), hbm_bytes=80e9).hbm_bytes, int)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("config", "parameters"),
    [  # totals as their checkpoints state them
        (LLAMA_70B, 70_553_706_496),
        (MIXTRAL_8X7B, 46_702_792_704),
        (QWEN3_30B_A3B, 30_532_122_624),
    ],
)
def test_parameter_counts_of_published_checkpoints(config: dict[str, Any], parameters: int) -> None:
    assert ModelShape.from_hugging_face(config).parameters == parameters


def test_catalogue_equals_hugging_face() -> None:
    assert ModelShape.from_hugging_face(LLAMA_70B, name="llama3-70b") == model("llama3-70b")
    assert model("llama3-8b").parameters == 8_030_261_248
    assert model("qwen3-32b").parameters == 32_762_123_264
    nested = {**LLAMA_70B, "rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    assert ModelShape.from_hugging_face(nested, name="llama3-70b") == model("llama3-70b")
    assert model("smollm2").parameters == 134_515_008
    shape = ModelShape.from_hugging_face(LLAMA_70B, dtype_bytes=1, kv_dtype_bytes=2)
    assert shape.weight_bytes == 70_553_706_496
    assert shape.kv_bytes_per_token == 327_680


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size",
                                 "vocab_size", "max_position_embeddings"])  # fmt: skip
def test_a_missing_field_is_named(key: str) -> None:
    config = {name: value for name, value in LLAMA_70B.items() if name != key}
    with pytest.raises(ConfigError, match=key):
        ModelShape.from_hugging_face(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "deepseek_v2"}, "model_type=deepseek_v2.*llama"),
        ({"quantization_config": {"quant_method": "fp8"}}, "say dtype_bytes"),
        ({"torch_dtype": "int4"}, "dtype=int4"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"num_key_value_heads": 7}, r"model\.kv_heads=7.*64"),
        ({"num_hidden_layers": "80"}, "num_hidden_layers=80"),
        ({"rope_theta": "big"}, "rope_theta=big"),
        ({"rms_norm_eps": -1.0}, r"model\.norm_eps=-1"),
    ],
)
def test_configs_that_would_be_counted_wrong_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelShape.from_hugging_face({**LLAMA_70B, **changes})


def test_read_takes_a_file_or_its_directory(tmp_path: Path) -> None:
    folder = tmp_path / "llama3-70b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_70B))
    assert ModelShape.read(str(folder)) == ModelShape.read(str(folder / "config.json")) == model("llama3-70b")
    with pytest.raises(ConfigError, match=r"model\.path=.*nowhere"):
        ModelShape.read(str(tmp_path / "nowhere"))


def test_a_directory_with_weights_is_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    assert ModelShape.read(str(tmp_path)).checkpoint == ""
    (tmp_path / "model.safetensors.index.json").touch()
    assert ModelShape.read(str(tmp_path)).checkpoint == str(tmp_path)
    assert ModelShape.read(str(tmp_path), checkpoint="other.gguf").checkpoint == "other.gguf"
    assert ModelShape.read(str(tmp_path / "config.json"), checkpoint="").checkpoint == ""


@pytest.mark.parametrize("name", sorted(set(PUBLISHED) & set(names("model")) - {"llama3-8b"}))
def test_catalogue_equals_what_was_published(name: str) -> None:
    """All but llama3-8b, whose catalogue leaves out the stretching of positions."""
    shape = model(name)
    widths: dict[str, Any] = {"dtype_bytes": shape.dtype_bytes, "kv_dtype_bytes": shape.kv_dtype_bytes}
    assert ModelShape.from_hugging_face(PUBLISHED[name], name, **widths) == shape


def test_kv_format_of_a_block() -> None:
    layout = model("llama3-70b").kv_format(512, "abc")
    assert (layout.fingerprint, layout.block_tokens, layout.block_bytes) == ("abc", 512, 512 * 327_680)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 300), st.integers(0, 100))
def test_prefill_flops_equal_a_sum_over_tokens(start: int, length: int) -> None:
    shape = model("tiny")
    one_by_one = sum(
        formulas.matmul_flops_per_token(shape) + 4 * shape.layers * shape.heads * shape.head_dim * (position + 1)
        for position in range(start, start + length)
    )
    assert formulas.prefill_flops(shape, start, length) == one_by_one


def test_dense_flops_are_twice_the_parameters_that_multiply() -> None:
    shape = model("llama3-70b")
    norms_and_embedding = shape.vocab * shape.d_model + (2 * shape.layers + 1) * shape.d_model
    multiplied = shape.parameters - norms_and_embedding
    assert formulas.matmul_flops_per_token(shape) + formulas.head_flops(shape) == 2 * multiplied
    assert formulas.weight_read_bytes(shape, 7) == 2 * multiplied
    per_token = formulas.decode_flops(shape, 3, 100) - formulas.decode_flops(shape, 3, 0)
    assert per_token == 100 * formulas.attention_flops_per_pair(shape)
    assert formulas.decode_bytes(shape, 3, 100) == 2 * multiplied + 103 * 327_680


def test_experts_read_and_computed() -> None:
    shape = ModelShape.from_hugging_face(QWEN3_30B_A3B)
    # "30B-A3B": about 3.3e9 parameters work on a token.
    assert (formulas.matmul_flops_per_token(shape) + formulas.head_flops(shape)) / 2 == pytest.approx(3.04e9, rel=0.01)
    for tokens in (1, 2, 50):
        expected = 128 * (1 - (1 - Fraction(8, 128)) ** tokens)
        assert Fraction(*formulas.touched_experts(shape, tokens)) == expected
    assert Fraction(*formulas.touched_experts(shape, 1)) == 8
    reads = [formulas.weight_read_bytes(shape, tokens) for tokens in (1, 2, 8, 64, 4096, 10**9)]
    assert reads == sorted(reads)
    everything = shape.weight_bytes - shape.dtype_bytes * (
        shape.head_parameters + shape.d_model + shape.layers * (2 * shape.d_model + 2 * shape.head_dim)
    )
    assert reads[-1] == pytest.approx(everything, rel=1e-6)


def test_all_reduce_bytes() -> None:
    shape = model("llama3-70b")
    # Two all-reduces a layer of 8192 x 2 B; a ring over 8 sends 2 x 7/8 of it.
    assert formulas.collective_bytes_per_token(shape, 8) == 80 * 2 * 8192 * 2 * 2 * 7 // 8
    assert formulas.collective_bytes_per_token(shape, 1) == 0


def test_kv_capacity() -> None:
    node, shape = hardware("a800x8"), model("llama3-70b")
    room = int(640e9 * 0.9) - shape.weight_bytes - 1_000_000_000
    assert kv_capacity_tokens(shape, node, 0.9, activations=1_000_000_000) == room // 327_680
    # 1.3 M tokens: room for ten prompts of 128k.
    assert 1_250_000 < kv_capacity_tokens(shape, node) < 1_330_000
    assert kv_capacity_tokens(model("tiny"), hardware("cpu")) > 1_000_000
    assert activation_bytes(shape, 8, 8192) > activation_bytes(shape, 8, 1024)
    with pytest.raises(ConfigError, match=r"model=llama3-70b.*hardware=tpu_v5e_8.*141,107,412,992 B"):
        kv_capacity_tokens(shape, hardware("tpu_v5e_8"))
    with pytest.raises(ConfigError, match=r"memory_share=1\.5"):
        kv_capacity_tokens(shape, node, 1.5)


def test_hardware_needs_no_interconnect_for_one_device() -> None:
    alone = hardware("cpu")
    assert isinstance(alone, Hardware)
    assert (alone.count, alone.interconnect_bytes_per_s) == (1, 0)


def test_all_to_all_bytes_against_drawn_routing() -> None:
    """Tokens start on any accelerator and draw 8 of 128 experts: count what leaves each, there and back."""
    shape, ways, tokens = ModelShape.from_hugging_face(QWEN3_30B_A3B), 8, 4000
    rng = np.random.default_rng(3)
    sent = 0
    for token in range(tokens):
        holders = set((rng.permutation(128)[:8] // (128 // ways)).tolist())
        sent += len(holders - {token % ways})
    drawn = sent / tokens
    assert drawn == pytest.approx(float(Fraction(*formulas.remote_expert_holders(shape, ways))), rel=0.01)
    hidden = shape.d_model * shape.dtype_bytes
    around_attention = 2 * (ways - 1) / ways * hidden  # reduce-scatter and all-gather
    there_and_back = 2 * drawn / ways * hidden
    expected = shape.layers * (around_attention + there_and_back)
    assert formulas.expert_parallel_bytes_per_token(shape, ways) == pytest.approx(expected, rel=0.01)
    assert formulas.remote_expert_holders(shape, 1)[0] == 0
    assert formulas.expert_parallel_bytes_per_token(shape, 1) == 0
