"""Qwen2 and Qwen2.5 (arXiv:2407.10671, arXiv:2412.15115), Qwen3 (arXiv:2505.09388)."""

from __future__ import annotations

from typing import Any

from mcjax.cost.families.common import activation, grouped_heads, layer_windows, plain_rope, sizes
from mcjax.cost.families.fields import Fields
from mcjax.cost.model_shape import ModelShape


def read_qwen2(fields: Fields) -> ModelShape:
    """Queries, keys and values have biases."""
    fields.only("attention_bias", True, False)  # what is written there is not looked at: the family has them
    return ModelShape(**_both(fields), **grouped_heads(fields), attention_bias=True)


def read_qwen3(fields: Fields) -> ModelShape:
    """Queries and keys are normalised instead."""
    fields.only("attention_bias", False)  # it would give the output product one too
    fields.assume(head_dim=128)
    return ModelShape(**_both(fields), **grouped_heads(fields), qk_norm=True)


def _both(fields: Fields) -> dict[str, Any]:
    found = sizes(fields)
    layers = found["layers"]
    window = fields.integer("sliding_window", 4096) if fields.flag("use_sliding_window", False) else 0
    fields.ignore("sliding_window")
    fields.only("use_mrope", False)
    full = fields.integer("max_window_layers", 28)  # so many first layers see everything
    windows = layer_windows(fields, layers, window, [layer >= full for layer in range(layers)])
    return {**found, **plain_rope(fields), "activation": activation(fields), "layer_windows": windows}
