"""Gated feed-forward layers (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from flax import nnx
from jaxtyping import Array, Float

from mcjax.cost.model_shape import ModelShape
from mcjax.models.layers.linear import einsum
from mcjax.models.layers.step import Step
from mcjax.models.weights import Maker

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


class FeedForward(nnx.Module):
    """`down(act(gate(x)) * up(x))`, of any width."""

    def __init__(self, shape: ModelShape, make: Maker, name: str):
        self.gate_up = nnx.Param(make(f"{name}.gate_up"))
        self.down = nnx.Param(make(f"{name}.down"))
        self.activation = shape.activation

    def __call__(self, x: Float[Array, "B T E"], step: Step) -> Float[Array, "B T E"]:
        both = einsum("bte,ehf->bthf", x, self.gate_up[...], step.flat).astype(x.dtype)
        hidden = ACTIVATIONS[self.activation](both[:, :, 0]) * both[:, :, 1]
        return einsum("btf,fe->bte", hidden, self.down[...]).astype(x.dtype)
