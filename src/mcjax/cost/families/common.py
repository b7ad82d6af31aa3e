"""What the configs of several families say in the same words: sizes, rotary positions, windows."""

from __future__ import annotations

from typing import Any

from mcjax.cost.architecture import Rope
from mcjax.cost.families.fields import Fields
from mcjax.errors import ConfigError

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_LAYERS = ("full_attention", "sliding_attention")


def sizes(fields: Fields) -> dict[str, Any]:
    """The arguments of `ModelShape` that every family says alike."""
    fields.only("is_encoder_decoder", False)
    fields.only("add_cross_attention", False)
    return {
        "name": "",
        "layers": fields.integer("num_hidden_layers"),
        "d_model": fields.integer("hidden_size"),
        "heads": fields.integer("num_attention_heads"),
        "d_ff": fields.integer("intermediate_size"),
        "vocab": fields.integer("vocab_size"),
        "max_context_tokens": fields.integer("max_position_embeddings"),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "tied_embeddings": fields.flag("tie_word_embeddings", False),
    }


def grouped_heads(fields: Fields) -> dict[str, Any]:
    """Key heads and their size: without a word of it, the width over the heads."""
    heads = fields.integer("num_attention_heads")
    share = fields.integer("hidden_size") // heads if heads else 0
    return {"kv_heads": fields.integer("num_key_value_heads"), "head_dim": fields.integer("head_dim", share)}


def routed_experts(fields: Fields) -> dict[str, Any]:
    """How many there are and how many a token takes. Their number has two names, whichever wrote the file."""
    experts = fields.integer("num_local_experts", 0) or fields.integer("num_experts")
    fields.only("num_experts", experts)
    return {"experts": experts, "experts_per_token": fields.integer("num_experts_per_tok")}


def activation(fields: Fields, key: str = "hidden_act") -> str:
    fields.only(key, *_ACTIVATIONS)
    return _ACTIVATIONS[fields.text(key, "silu")]


def plain_rope(fields: Fields) -> dict[str, Any]:
    """`rope` and `rope_theta` of a decoder whose layers all turn alike."""
    found = rope(fields)
    return {"rope_theta": found.theta, "rope": None if found.scaling == "none" else found}


def rope(fields: Fields) -> Rope:
    """From `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`."""
    fields.only("partial_rotary_factor", 1.0)
    theta = fields.number("rope_theta", 10_000.0)
    new, old = fields.part("rope_parameters"), fields.part("rope_scaling")
    if new and old:
        raise ConfigError("rope_scaling", "...", "is said beside rope_parameters, which says the same; leave one out")
    part = new or old
    return Rope(theta) if part is None else scaled(part, theta, fields.integer("max_position_embeddings"))


def scaled(part: Fields, theta: float, context_tokens: int) -> Rope:
    """From one mapping; `theta` and `context_tokens` are what the config says outside of it."""
    theta = part.number("rope_theta", theta)
    part.only("partial_rotary_factor", 1.0)
    kind = part.text("rope_type", part.text("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", part.number("factor"))
    if kind == "dynamic":
        part.only("original_max_position_embeddings", context_tokens)
        return Rope(theta, "dynamic", part.number("factor"), context_tokens)
    if kind == "llama3":
        return Rope(
            theta,
            "llama3",
            part.number("factor"),
            part.integer("original_max_position_embeddings"),
            low_frequency_factor=part.number("low_freq_factor"),
            high_frequency_factor=part.number("high_freq_factor"),
        )
    if kind == "yarn":
        return _yarn(part, theta, context_tokens)
    raise ConfigError(
        part.name("rope_type"), kind, "is not supported", ("default", "linear", "dynamic", "llama3", "yarn")
    )


def _yarn(part: Fields, theta: float, context_tokens: int) -> Rope:
    original = part.integer("original_max_position_embeddings", context_tokens)
    stated = part.number("attention_factor", 0.0)
    return Rope(
        theta,
        "yarn",
        part.number("factor", context_tokens / original),
        original,
        beta_fast=part.number("beta_fast", 32.0),
        beta_slow=part.number("beta_slow", 1.0),
        attention_factor=stated or None,
        mscale=part.number("mscale", 0.0),
        mscale_all_dim=part.number("mscale_all_dim", 0.0),
        truncate=part.flag("truncate", True),
    )


def layer_windows(fields: Fields, layers: int, window: int, otherwise: list[bool]) -> tuple[int, ...]:
    """What each layer sees, in tokens; empty if all see everything.

    `window`: of layers that have one, 0: none has. `otherwise`: which have one where `layer_types` does not say.
    """
    kinds = fields.sequence("layer_types")
    for kind in kinds:
        if kind not in _LAYERS:
            raise ConfigError(fields.name("layer_types"), kind, "is not supported", _LAYERS)
    if kinds and len(kinds) != layers:
        raise ConfigError(fields.name("layer_types"), len(kinds), f"must be one a layer, {layers}")
    local = [kind == "sliding_attention" for kind in kinds] or otherwise
    if kinds and any(local) and not window:
        raise ConfigError(fields.name("sliding_window"), None, "layer_types has layers with a window; say how wide")
    return tuple(window if each else 0 for each in local) if window and any(local) else ()
