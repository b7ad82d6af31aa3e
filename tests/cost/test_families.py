"""Configs of every family become shapes; what is not understood is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from family_cases import CONFIGS, rope
from mcjax.cost.architecture import Latent, Rope, Routing
from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError
from published_configs import PUBLISHED

ALL = {**CONFIGS, **{f"published {name}": config for name, config in PUBLISHED.items()}}


def read(name: str, **changes: Any) -> ModelShape:
    return ModelShape.from_hugging_face({**ALL[name], **changes}, dtype_bytes=2)


def without(name: str, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in ALL[name].items() if key not in keys}


@pytest.mark.parametrize("name", ALL)
def test_every_family_is_read(name: str) -> None:
    shape, config = read(name), ALL[name].get("text_config", ALL[name])
    assert (shape.layers, shape.d_model) == (config["num_hidden_layers"], config["hidden_size"])


def test_what_is_particular_to_a_family() -> None:
    assert read("qwen2").attention_bias
    assert not read("qwen2").qk_norm
    assert read("qwen3").qk_norm
    assert not read("qwen3").attention_bias
    mixture = read("mixtral")
    assert (mixture.experts, mixture.experts_per_token, mixture.d_ff) == (4, 2, 80)
    assert mixture.routing == Routing()
    assert (read("qwen3_moe").experts, read("qwen3_moe").d_ff) == (8, 24)
    assert not read("qwen3_moe", norm_topk_prob=False).routing.normalised
    gemma = read("gemma2")
    assert (gemma.family, gemma.activation, gemma.attention_soft_cap, gemma.logits_soft_cap) == (
        "gemma", "gelu_tanh", 5.0, 3.0,
    )  # fmt: skip
    assert gemma.sandwich_norms
    assert gemma.unit_offset_norms
    assert gemma.tied_embeddings
    assert gemma.embedding_scale == math.sqrt(48)
    assert gemma.query_scale == 24**-0.5


def test_deepseek() -> None:
    shape = read("deepseek_v3")
    assert shape.latent == Latent(kv_rank=32, rope_dim=8, nope_dim=16, value_dim=12, query_rank=40)
    assert shape.routing == Routing("sigmoid", True, True, groups=4, groups_per_token=2, scale=2.5)
    assert (shape.head_dim, shape.kv_heads, shape.d_ff, shape.expert_d_ff) == (24, 4, 80, 24)
    assert (shape.shared_experts, shape.dense_layers, shape.query_scale) == (1, 1, 0.0)
    stretched = read("deepseek_v3-yarn")
    assert stretched.latent
    assert stretched.latent.query_rank == 0
    assert stretched.query_scale == pytest.approx((0.1 * math.log(4) + 1) ** 2 / math.sqrt(24))
    # What the published model code gives.
    assert read("published deepseek-v3").query_scale == pytest.approx(0.1352337788608801)


@pytest.mark.parametrize(
    ("name", "changes", "windows"),
    [
        ("mistral", {}, (9, 9, 9)),
        ("mistral-full", {}, ()),
        ("mixtral", {"sliding_window": 5}, (5, 5, 5)),
        ("gemma2", {}, (9, 0, 9, 0, 9, 0)),
        ("gemma3", {}, (9, 9, 9, 9, 9, 0)),
        ("gemma3", {"layer_types": None}, (9, 9, 9, 9, 9, 0)),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": 3}, (9, 9, 0, 9, 9, 0)),
        ("qwen2", {"sliding_window": 7}, ()),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}, (0, 7, 7)),
        ("qwen3", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 3}, ()),
        (
            "qwen3",
            {
                "sliding_window": 7,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            (0, 7, 0),
        ),
        ("qwen3_moe", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 3}, (7, 7, 7)),
    ],
)
def test_windows(name: str, changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert read(name, **changes).layer_windows == windows


def test_both_notations_of_rotary_positions() -> None:
    for name in ("llama-linear", "llama-dynamic", "llama3", "llama-yarn", "deepseek_v3-yarn", "gemma2"):
        new = ALL[name]["rope_parameters"]
        scaling = {("type" if key == "rope_type" else key): value for key, value in new.items() if key != "rope_theta"}
        old = {**without(name, "rope_parameters"), "rope_theta": new["rope_theta"], "rope_scaling": scaling}
        assert ModelShape.from_hugging_face(old, dtype_bytes=2) == read(name)
    parts = ALL["gemma3"]["rope_parameters"]
    old = {
        **without("gemma3", "rope_parameters"), "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": parts["full_attention"]["factor"]},
    }  # fmt: skip
    assert ModelShape.from_hugging_face(old, dtype_bytes=2) == read("gemma3")


def test_rotary_positions() -> None:
    assert read("llama").rope is None
    assert read("llama-linear").rotary == Rope(10_000.0, "linear", 4.0)
    assert read("llama-dynamic").rotary == Rope(10_000.0, "dynamic", 4.0, 32)
    assert read("llama3").rotary == Rope(500_000.0, "llama3", 8.0, 32)
    assert read("llama-yarn").rotary == Rope(10_000.0, "yarn", 4.0, 32)
    assert read("published kimi-k2").rotary == Rope(
        50_000.0, "yarn", 32.0, 4096, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0
    )
    assert read("gemma3").rotary == Rope(1e6, "linear", 8.0)
    assert read("gemma3").local_rope == Rope(1e4)
    # By the families' own bases, where a file leaves them out.
    assert ModelShape.from_hugging_face(without("mixtral", "rope_parameters")).rope_theta == 1e6
    assert ModelShape.from_hugging_face(without("gemma3", "rope_parameters")).rope_theta == 1e6
    assert ModelShape.from_hugging_face(without("llama", "rope_parameters")).rope_theta == 1e4


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"mlp_bias": True}, "mlp_bias=True.*not supported"),
        ("llama", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"hidden_act": "relu"}, "hidden_act=relu.*silu"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, r"rope_parameters\.rope_type=longrope.*yarn"),
        ("llama", rope(1e4, rope_type="linear"), r"rope_parameters\.factor=None"),
        ("llama3", rope(1e4, rope_type="llama3", factor=8.0), r"rope_parameters\.original_max_position_embeddings"),
        ("llama", rope(1e4, spiral=3), r"rope_parameters\.spiral=3"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling.*leave one out"),
        ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types=1.*6"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 6}, "layer_types=chunked_attention.*sliding_attention"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "sliding_window=None"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func=softmax.*sigmoid"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method=greedy"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2.*4"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False"),
        ("published gemma3-27b", {"text_config": None}, "text_config=None"),
        ("published gemma3-27b", {"text_config": {"audio": 1}}, "num_hidden_layers"),
        ("mixtral", {"num_experts": 5}, "num_experts=5.*4"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, None),
        ("llama", {"attention_dropout": 0.1, "torch_dtype": "int3", "dtype": None}, None),
    ],
)
def test_what_no_model_here_computes_is_refused(name: str, changes: dict[str, Any], message: str | None) -> None:
    if message is None:  # its width is given
        read(name, **changes)
        return
    with pytest.raises(ConfigError, match=message):
        read(name, **changes)


def test_dense_layers_of_qwen3_moe_have_their_own_width() -> None:
    shape = read("qwen3_moe", mlp_only_layers=[0, 1])
    assert (shape.dense_layers, shape.d_ff, shape.expert_d_ff) == (2, 80, 24)


REQUIRED = {
    "llama": ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    "qwen3": ("num_key_value_heads", "max_position_embeddings"),
    "gemma2": ("num_key_value_heads",),
    "mixtral": ("num_experts_per_tok",),
    "qwen3_moe": ("moe_intermediate_size", "num_experts"),
    "deepseek_v3": ("kv_lora_rank", "qk_rope_head_dim", "n_routed_experts", "moe_intermediate_size"),
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in REQUIRED.items() for key in keys])
def test_a_missing_field_is_named(name: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}=None"):
        ModelShape.from_hugging_face(without(name, key))


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(ALL)),
    st.text("abcdefghijklmnopqrstuvwxyz_", max_size=20).map("new_{}".format),
    st.sampled_from([True, False, 0, 1.5, "on", [1], {"a": 1}, None]),
    st.booleans(),
)
def test_an_unknown_field_is_refused_by_name(name: str, key: str, value: object, inside: bool) -> None:
    config: dict[str, Any] = {**ALL[name]}
    place = next((p for p in ("text_config", "rope_parameters", "rope_scaling") if inside and config.get(p)), "")
    if place:
        config[place] = {**config[place], key: value}
    else:
        config[key] = value
    where = f"{place}.{key}" if place else key
    with pytest.raises(ConfigError, match=rf"^{where}=.*effect"):
        ModelShape.from_hugging_face(config, dtype_bytes=2)
