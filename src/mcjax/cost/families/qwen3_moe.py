"""Qwen3 with experts (arXiv:2505.09388): attention as Qwen3's, no shared experts."""

from __future__ import annotations

from mcjax.cost.architecture import Routing
from mcjax.cost.families.common import activation, grouped_heads, layer_windows, plain_rope, routed_experts, sizes
from mcjax.cost.families.fields import Fields
from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError


def read(fields: Fields) -> ModelShape:
    fields.only("attention_bias", False)  # it would give the output product one too
    fields.only("decoder_sparse_step", 1)
    fields.ignore("max_window_layers")  # transformers gives all layers the window here
    found = sizes(fields)
    layers, width = found["layers"], fields.integer("moe_intermediate_size")
    dense = fields.sequence("mlp_only_layers")
    if dense and sorted(dense) != list(range(len(dense))):
        raise ConfigError("mlp_only_layers", dense, "only the first layers may be without experts")
    window = fields.integer("sliding_window", 4096) if fields.flag("use_sliding_window", False) else 0
    fields.ignore("sliding_window")
    if not dense:
        found["d_ff"] = width  # there is no layer of the other width
    return ModelShape(
        **found,
        **grouped_heads(fields),
        **plain_rope(fields),
        qk_norm=True,
        activation=activation(fields),
        layer_windows=layer_windows(fields, layers, window, [True] * layers),
        dense_layers=len(dense),
        expert_d_ff=width if dense else 0,
        **routed_experts(fields),
        routing=Routing(normalised=fields.flag("norm_topk_prob", False)),
    )
