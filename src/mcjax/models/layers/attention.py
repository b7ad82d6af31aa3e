"""Grouped-query attention (arXiv:2305.13245): the products around a kernel that writes keys and values, and attends."""

from __future__ import annotations

from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Shaped

from mcjax.cost.model_shape import ModelShape
from mcjax.models.layers.linear import einsum
from mcjax.models.layers.norm import RMSNorm
from mcjax.models.layers.rotary import rotate
from mcjax.models.layers.step import Step
from mcjax.models.weights import Maker


class Attention(nnx.Module):
    """One layer's. Optional, as the shape says: biases, norms of queries and keys, a window, a soft cap, a scale."""

    def __init__(self, shape: ModelShape, make: Maker, name: str, layer: int):
        self.layer = layer
        self.mix = nnx.Param(make(f"{name}.mix"))
        self.mix_bias = nnx.Param(make(f"{name}.mix_bias")) if shape.attention_bias else None
        self.query_norm = RMSNorm(shape, make, f"{name}.query_norm") if shape.qk_norm else None
        self.key_norm = RMSNorm(shape, make, f"{name}.key_norm") if shape.qk_norm else None
        self.output = nnx.Param(make(f"{name}.output"))
        self.local = shape.windows[layer] is not None
        self.look = look_of(shape, layer)

    def __call__(
        self, x: Float[Array, "B T E"], pages: Shaped[Array, "P L C ..."], step: Step
    ) -> tuple[Float[Array, "B T E"], Shaped[Array, "P L C ..."]]:
        mixed = einsum("bte,ekgd->btkgd", x, self.mix[...], step.flat)
        if self.mix_bias is not None:
            mixed = mixed + self.mix_bias[...]
        mixed = mixed.astype(x.dtype)
        batch, steps, _, _, head_dim = mixed.shape
        queries = mixed[:, :, :, :-2].reshape(batch, steps, -1, head_dim)
        keys, values = mixed[:, :, :, -2], mixed[:, :, :, -1]
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        turn = step.local_turn if self.local else step.turn
        queries, keys = rotate(queries, turn), rotate(keys, turn)
        attended, pages = step.attend(
            queries, keys, values, pages, self.layer, step.page_table, step.positions, **self.look
        )
        return einsum("bthd,hde->bte", attended, self.output[...]).astype(x.dtype), pages


def look_of(shape: ModelShape, layer: int) -> dict[str, Any]:
    """The keyword arguments of `kernels.base.Attention` that this layer's attention needs."""
    wanted = {
        "window": shape.windows[layer],
        "soft_cap": shape.attention_soft_cap or None,
        "scale": shape.query_scale or None,
    }
    return {name: value for name, value in wanted.items() if value is not None}
