"""Gemma 2 (arXiv:2408.00118) and Gemma 3 (arXiv:2503.19786); of its models that see, the part that reads and writes."""

from __future__ import annotations

from typing import Any

from mcjax.cost.architecture import Rope
from mcjax.cost.families.common import activation, grouped_heads, layer_windows, rope, scaled, sizes
from mcjax.cost.families.fields import Fields
from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError


def read_gemma2(fields: Fields) -> ModelShape:
    """Every other layer has a window, the first one among them."""
    fields.assume(attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    found, turned = _both(fields, pattern=2), rope(fields)
    return ModelShape(**found, rope_theta=turned.theta, rope=None if turned.scaling == "none" else turned)


def read_gemma3(fields: Fields) -> ModelShape:
    """Five layers with a window, one without; the two kinds turn differently; queries and keys are normalised."""
    pattern = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
    found = _both(fields, pattern)
    whole, local = _two_ropes(fields)
    plain = whole.scaling == "none"
    return ModelShape(**found, rope_theta=whole.theta, rope=None if plain else whole, local_rope=local, qk_norm=True)


def read_multimodal(fields: Fields) -> ModelShape:
    """Of `gemma3`: its `text_config`; what sees is left out."""
    fields.ignore("vision_config", "mm_tokens_per_image", "image_token_index", "boi_token_index", "eoi_token_index")
    fields.ignore("image_token_id", "boi_token_id", "eoi_token_id")
    fields.only("tie_word_embeddings", True)
    text = fields.part("text_config")
    if text is None:
        raise ConfigError("text_config", None, "the config of this family needs this field")
    text.only("model_type", "gemma3_text")
    text.ignore("dtype", "torch_dtype")
    # Such files leave out what is the family's own.
    text.assume(vocab_size=262_208, max_position_embeddings=131_072, num_attention_heads=8, num_key_value_heads=4)
    return read_gemma3(text)


def _both(fields: Fields, pattern: int) -> dict[str, Any]:
    fields.assume(head_dim=256, sliding_window=4096, tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh")
    fields.only("attention_bias", False)
    fields.only("use_bidirectional_attention", False)
    fields.ignore("hidden_act")  # transformers reads `hidden_activation`
    found, heads = sizes(fields), grouped_heads(fields)
    layers = found["layers"]
    local = [(layer + 1) % pattern != 0 for layer in range(layers)]
    pre_attention = fields.number("query_pre_attn_scalar", 256)
    return {
        **found,
        **heads,
        "family": "gemma",
        "activation": activation(fields, "hidden_activation"),
        "layer_windows": layer_windows(fields, layers, fields.integer("sliding_window", 0), local),
        "query_scale": 0.0 if pre_attention == heads["head_dim"] else pre_attention**-0.5,
        "attention_soft_cap": fields.number("attn_logit_softcapping", 0.0),
        "logits_soft_cap": fields.number("final_logit_softcapping", 0.0),
        "embedding_scale": found["d_model"] ** 0.5,
        "unit_offset_norms": True,
        "sandwich_norms": True,
    }


def _two_ropes(fields: Fields) -> tuple[Rope, Rope]:
    """Of layers that see everything, and of those with a window."""
    context_tokens = fields.integer("max_position_embeddings")
    theta, local_theta = fields.number("rope_theta", 1e6), fields.number("rope_local_base_freq", 1e4)
    parts = fields.part("rope_parameters")
    if parts is None:
        old = fields.part("rope_scaling")
        return Rope(theta) if old is None else scaled(old, theta, context_tokens), Rope(local_theta)
    whole, local = parts.part("full_attention"), parts.part("sliding_attention")
    return (
        Rope(theta) if whole is None else scaled(whole, theta, context_tokens),
        Rope(local_theta) if local is None else scaled(local, local_theta, context_tokens),
    )
