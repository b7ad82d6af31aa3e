"""Mixtral (arXiv:2401.04088): experts in every layer, of which a token takes the best few."""

from __future__ import annotations

from mcjax.cost.families.common import routed_experts
from mcjax.cost.families.fields import Fields
from mcjax.cost.families.mistral import windowed
from mcjax.cost.model_shape import ModelShape


def read(fields: Fields) -> ModelShape:
    fields.assume(rope_theta=1e6, rms_norm_eps=1e-5)
    return windowed(
        fields,
        **routed_experts(fields),
    )
