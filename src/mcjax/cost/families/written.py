"""From a `ModelShape` back to a Hugging Face `config.json`: what `READERS` reads, all of it said. Free of jax."""

from __future__ import annotations

from typing import Any

from mcjax.cost.architecture import Latent, Rope
from mcjax.cost.families import read
from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
"""What transformers makes of each `model_type`."""
_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}


def config_of(shape: ModelShape) -> dict[str, Any]:
    """A config that gives this shape. Raises `ConfigError` for a shape that no family has, naming the first field."""
    kind = _kind(shape)
    config: dict[str, Any] = {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.d_model,
        "intermediate_size": shape.d_ff,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.latent.rope_dim if shape.latent else shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_context_tokens,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied_embeddings,
        "dtype": shape.dtype,
        "attention_bias": False,
        "hidden_act": _ACTIVATIONS[shape.activation],
        "rope_parameters": _rope(shape.rotary),
    }
    config |= _windows(shape, kind) | _experts(shape, kind)
    if kind.startswith("gemma"):
        config |= _gemma(shape, kind)
    if shape.latent:
        config |= _latent(shape, shape.latent)
    _check(shape, config, kind)
    return config


def _kind(shape: ModelShape) -> str:
    if shape.latent:
        return "deepseek_v3"
    if shape.sandwich_norms:
        return "gemma3_text" if shape.qk_norm else "gemma2"
    if shape.experts:
        return "qwen3_moe" if shape.qk_norm else "mixtral"
    if shape.qk_norm:
        return "qwen3"
    if shape.attention_bias:
        return "qwen2"
    return "mistral" if any(shape.layer_windows) else "llama"


def _rope(rope: Rope) -> dict[str, Any]:
    said: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.scaling == "none":
        return said
    said |= {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling in ("llama3", "yarn"):
        said["original_max_position_embeddings"] = rope.original_context_tokens
    if rope.scaling == "llama3":
        said |= {"low_freq_factor": rope.low_frequency_factor, "high_freq_factor": rope.high_frequency_factor}
    if rope.scaling == "yarn":
        said |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        optional = {
            "attention_factor": rope.attention_factor,
            "mscale": rope.mscale,
            "mscale_all_dim": rope.mscale_all_dim,
        }
        said |= {name: value for name, value in optional.items() if value}
    return said


def _windows(shape: ModelShape, kind: str) -> dict[str, Any]:
    widths = sorted(set(shape.layer_windows) - {0})
    window = widths[0] if widths else None
    if kind in ("llama", "deepseek_v3"):
        return {}
    said: dict[str, Any] = {"sliding_window": window}
    if kind.startswith("qwen"):
        said["use_sliding_window"] = window is not None
    if window and kind not in ("mistral", "mixtral", "qwen3_moe"):
        said["layer_types"] = ["sliding_attention" if each else "full_attention" for each in shape.layer_windows]
    return said


def _experts(shape: ModelShape, kind: str) -> dict[str, Any]:
    if not shape.experts:
        return {}
    count = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts"}.get(kind, "n_routed_experts")
    said: dict[str, Any] = {count: shape.experts, "num_experts_per_tok": shape.experts_per_token}
    if kind == "mixtral":
        return said
    said |= {
        "moe_intermediate_size": shape.expert_d_ff or shape.d_ff,
        "norm_topk_prob": shape.routing.normalised,
    }
    if kind == "qwen3_moe":
        return said | {"mlp_only_layers": list(range(shape.dense_layers)), "decoder_sparse_step": 1}
    return said | {
        "n_shared_experts": shape.shared_experts,
        "first_k_dense_replace": shape.dense_layers,
        "n_group": shape.routing.groups,
        "topk_group": shape.routing.groups_per_token,
        "routed_scaling_factor": shape.routing.scale,
        "scoring_func": shape.routing.scores,
        "topk_method": "noaux_tc",
    }


def _gemma(shape: ModelShape, kind: str) -> dict[str, Any]:
    scale = shape.query_scale**-2 if shape.query_scale else float(shape.head_dim)
    said: dict[str, Any] = {
        "hidden_activation": _ACTIVATIONS[shape.activation],
        "query_pre_attn_scalar": round(scale) if abs(scale - round(scale)) < 1e-6 else scale,
        "attn_logit_softcapping": shape.attention_soft_cap or None,
        "final_logit_softcapping": shape.logits_soft_cap or None,
    }
    if kind == "gemma3_text":
        local = shape.local_rope or shape.rotary
        said["rope_parameters"] = {"full_attention": _rope(shape.rotary), "sliding_attention": _rope(local)}
    return said


def _latent(shape: ModelShape, latent: Latent) -> dict[str, Any]:
    return {
        "q_lora_rank": latent.query_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_rope_head_dim": latent.rope_dim,
        "qk_nope_head_dim": latent.nope_dim,
        "v_head_dim": latent.value_dim,
        "rope_interleave": True,
    }


def _check(shape: ModelShape, config: dict[str, Any], kind: str) -> None:
    ours, theirs = shape.identity(), read(config, shape.dtype_bytes, shape.kv_dtype_bytes).identity()
    for name, value in ours.items():
        other = theirs[name]
        same = abs(value - other) <= 1e-12 * abs(value) if isinstance(value, float) else value == other
        if name == "rope":
            same = (value or theirs["rope"]) == (theirs["rope"] or value)
        if not same and name != "quantisation":
            raise ConfigError(f"model.{name}", value, f"no Hugging Face family has it; {kind} would have {other}")
