"""What llama.cpp calls our pieces, and how it lays them out, for each architecture that we read. Free of jax.

Names: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py. Layouts: that project's converters.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcjax.cost.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class Architecture:
    """Of a value of `general.architecture`."""

    neighbours: bool = False
    """Rotary pairs are rows (2i, 2i + 1), where ours are (i, i + D/2)."""


ARCHITECTURES = {
    "llama": Architecture(neighbours=True),  # also Mistral and Mixtral: the converter interleaves their rows
    "qwen2": Architecture(),
    "qwen3": Architecture(),
    "qwen3moe": Architecture(),
    "gemma2": Architecture(),
    "gemma3": Architecture(),
    "deepseek2": Architecture(neighbours=True),  # as its authors have it
}

OUTSIDE = {"embedding": "token_embd.weight", "final_norm.gain": "output_norm.weight", "head": "output.weight"}
IN_BLOCK = {
    "attention_norm.gain": "attn_norm.weight",
    "attention.query": "attn_q.weight",
    "attention.key": "attn_k.weight",
    "attention.value": "attn_v.weight",
    "attention.query_bias": "attn_q.bias",
    "attention.key_bias": "attn_k.bias",
    "attention.value_bias": "attn_v.bias",
    "attention.query_norm.gain": "attn_q_norm.weight",
    "attention.key_norm.gain": "attn_k_norm.weight",
    "attention.output": "attn_output.weight",
    "attention_post_norm.gain": "post_attention_norm.weight",
    "feed_forward_norm.gain": "ffn_norm.weight",
    "feed_forward.gate": "ffn_gate.weight",
    "feed_forward.up": "ffn_up.weight",
    "feed_forward.down": "ffn_down.weight",
    "feed_forward_post_norm.gain": "post_ffw_norm.weight",
    "feed_forward.router": "ffn_gate_inp.weight",
    "feed_forward.router_bias": "exp_probs_b.bias",
    "feed_forward.shared.gate": "ffn_gate_shexp.weight",
    "feed_forward.shared.up": "ffn_up_shexp.weight",
    "feed_forward.shared.down": "ffn_down_shexp.weight",
}
OF_EXPERTS = {
    "feed_forward.gate": "ffn_gate_exps.weight",
    "feed_forward.up": "ffn_up_exps.weight",
    "feed_forward.down": "ffn_down_exps.weight",
}
"""`[X, out, in]`; older files have a tensor an expert, `ffn_gate.X.weight`."""
OF_LATENT = {
    "attention.query_down": "attn_q_a.weight",
    "attention.query_norm.gain": "attn_q_a_norm.weight",
    "attention.latent_down": "attn_kv_a_mqa.weight",
    "attention.latent_norm.gain": "attn_kv_a_norm.weight",
    "attention.key_up": "attn_k_b.weight",
    "attention.value_up": "attn_v_b.weight",
}
JOINED_LATENT = "attn_kv_b.weight"
"""Older files: what is now `attn_k_b`, turned, above `attn_v_b`, head by head."""


def tensor_name(shape: ModelShape, name: str) -> str:
    """What a file calls the piece `name`."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, layer, inside = name.split(".", 2)
    names = IN_BLOCK
    if shape.has_experts(int(layer)):
        names = names | OF_EXPERTS
    if shape.latent:
        names = names | OF_LATENT
        if shape.latent.query_rank:
            names = names | {"attention.query": "attn_q_b.weight"}
    return f"blk.{layer}.{names[inside]}"


def expert_name(name: str, expert: int) -> str:
    """What an older file calls the piece `name` of one expert."""
    _, layer, inside = name.split(".", 2)
    stem = IN_BLOCK[inside].removesuffix(".weight")
    return f"blk.{layer}.{stem}.{expert}.weight"
