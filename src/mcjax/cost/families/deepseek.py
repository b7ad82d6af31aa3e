"""DeepSeek-V3 (arXiv:2412.19437) and Kimi-K2, which is built alike: latent attention, shared and routed experts.

The layers that predict further tokens (`num_nextn_predict_layers`) are no part of the model here.
"""

from __future__ import annotations

import math

from mcjax.cost.architecture import Latent, Rope, Routing
from mcjax.cost.families.common import activation, plain_rope, sizes
from mcjax.cost.families.fields import Fields
from mcjax.cost.model_shape import ModelShape


def read(fields: Fields) -> ModelShape:
    _refuse_variants(fields)
    found = sizes(fields)
    turned = plain_rope(fields)
    latent = Latent(
        kv_rank=fields.integer("kv_lora_rank"),
        rope_dim=fields.integer("qk_rope_head_dim"),
        nope_dim=fields.integer("qk_nope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
        query_rank=fields.integer("q_lora_rank", 0),
    )
    heads, head_dim = found["heads"], latent.nope_dim + latent.rope_dim
    fields.only("num_key_value_heads", heads)
    fields.only("head_dim", latent.rope_dim)  # as transformers writes it
    fields.only("qk_head_dim", head_dim)
    layers, dense = found["layers"], fields.integer("first_k_dense_replace", 3)
    return ModelShape(
        **found,
        **turned,
        family="deepseek",
        kv_heads=heads,
        head_dim=head_dim,
        latent=latent,
        activation=activation(fields),
        query_scale=_query_scale(turned["rope"], head_dim),
        dense_layers=min(dense, layers),
        expert_d_ff=fields.integer("moe_intermediate_size"),
        experts=fields.integer("n_routed_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        shared_experts=fields.integer("n_shared_experts", 0),
        routing=Routing(
            scores="sigmoid",
            normalised=fields.flag("norm_topk_prob", True),
            bias=True,
            groups=fields.integer("n_group", 1),
            groups_per_token=fields.integer("topk_group", 1),
            scale=fields.number("routed_scaling_factor", 1.0),
        ),
    )


def _refuse_variants(fields: Fields) -> None:
    fields.ignore("num_nextn_predict_layers", "num_mtp_layers", "ep_size")
    fields.only("attention_bias", False)
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields.only("moe_layer_freq", 1)
    fields.only("rope_interleave", True)  # how checkpoints order what is turned; it is undone as they are read


def _query_scale(rope: Rope | None, head_dim: int) -> float:
    """Scores of a stretched context are sharpened (YaRN, arXiv:2309.00071, 3.4), queries and keys alike; 0: plain."""
    if rope is None or not rope.mscale_all_dim or rope.factor <= 1:
        return 0.0
    sharper = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1
    return head_dim**-0.5 * sharper**2
