"""Llama 2, 3, 3.1 and later (arXiv:2302.13971, arXiv:2407.21783)."""

from __future__ import annotations

from mcjax.cost.families.common import activation, grouped_heads, plain_rope, sizes
from mcjax.cost.families.fields import Fields
from mcjax.cost.model_shape import ModelShape


def read(fields: Fields) -> ModelShape:
    fields.only("mlp_bias", False)
    fields.only("attention_bias", False)  # it would give the output product one too
    fields.only("rope_interleaved", False)
    fields.assume(num_key_value_heads=fields.integer("num_attention_heads"))
    return ModelShape(**sizes(fields), **grouped_heads(fields), **plain_rope(fields), activation=activation(fields))
