"""A small config of each family, as its `config.json` would say it. Sizes are unlike one another on purpose."""

from __future__ import annotations

from typing import Any

DENSE: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "dtype": "float32",
    "attention_bias": False,
}  # fmt: skip


def rope(theta: float, **scaling: Any) -> dict[str, Any]:
    """As transformers 5 writes it; `rope_theta` and `rope_scaling` are the older way."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **scaling}}


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
GEMMA: dict[str, Any] = {
    **DENSE, "num_hidden_layers": 6, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24,
    "sliding_window": 9, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "output_router_logits": False}
LATENT: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 48, "intermediate_size": 80, "moe_intermediate_size": 24,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 97,
    "q_lora_rank": 40, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "rope_interleave": True, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "dtype": "float32", **rope(10_000.0),
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**DENSE, "model_type": "llama", "mlp_bias": False, **rope(10_000.0)},
    "llama-tied": {**DENSE, "model_type": "llama", "mlp_bias": False, "tie_word_embeddings": True, **rope(500_000.0)},
    "llama-linear": {**DENSE, "model_type": "llama", **rope(10_000.0, rope_type="linear", factor=4.0)},
    "llama-dynamic": {
        **DENSE, "model_type": "llama", "max_position_embeddings": 32,
        **rope(10_000.0, rope_type="dynamic", factor=4.0),
    },
    "llama3": {**DENSE, "model_type": "llama", **rope(500_000.0, **LLAMA3)},
    "llama-yarn": {**DENSE, "model_type": "llama", **rope(10_000.0, **YARN)},
    "qwen2": {**DENSE, "model_type": "qwen2", "use_sliding_window": False, **rope(1_000_000.0)},
    "qwen3": {**DENSE, "model_type": "qwen3", "use_sliding_window": False, **rope(1_000_000.0)},
    "mistral": {**DENSE, "model_type": "mistral", "sliding_window": 9, **rope(10_000.0)},
    "mistral-full": {**DENSE, "model_type": "mistral", "sliding_window": None, **rope(10_000.0)},
    "gemma2": {
        **GEMMA, "model_type": "gemma2", "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
        **rope(10_000.0),
    },
    "gemma3": {
        **GEMMA, "model_type": "gemma3_text", "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
        },
    },
    "mixtral": {
        **DENSE, **EXPERTS, "model_type": "mixtral", "num_local_experts": 4, "sliding_window": None,
        **rope(1_000_000.0),
    },
    "qwen3_moe": {
        **DENSE, **EXPERTS, "model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 24,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False,
        **rope(1_000_000.0),
    },
    "deepseek_v3": LATENT,
    "deepseek_v3-yarn": {**LATENT, "q_lora_rank": None, **rope(10_000.0, **YARN, mscale=1.0, mscale_all_dim=1.0)},
}  # fmt: skip
