"""Mistral (arXiv:2310.06825): all layers have the window, if there is one."""

from __future__ import annotations

from typing import Any

from mcjax.cost.families.common import activation, grouped_heads, layer_windows, plain_rope, sizes
from mcjax.cost.families.fields import Fields
from mcjax.cost.model_shape import ModelShape


def read(fields: Fields) -> ModelShape:
    fields.assume(sliding_window=4096)
    return windowed(fields)


def windowed(fields: Fields, **more: Any) -> ModelShape:
    """A decoder whose layers have one window, or none has; `more` are further arguments of `ModelShape`."""
    fields.only("attention_bias", False)
    found = sizes(fields)
    layers, window = found["layers"], fields.integer("sliding_window", 0)
    return ModelShape(
        **found,
        **grouped_heads(fields),
        **plain_rope(fields),
        activation=activation(fields),
        layer_windows=layer_windows(fields, layers, window, [True] * layers),
        **more,
    )
