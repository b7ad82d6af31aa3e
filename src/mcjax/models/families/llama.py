"""Llama (arXiv:2302.13971), and all that put their layers together as it does: Qwen, Mistral, Mixtral."""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float, Shaped

from mcjax.cost.model_shape import ModelShape
from mcjax.models.layers.attention import Attention
from mcjax.models.layers.experts import Experts
from mcjax.models.layers.feed_forward import FeedForward
from mcjax.models.layers.norm import RMSNorm
from mcjax.models.layers.step import Step
from mcjax.models.weights import Maker


class Block(nnx.Module):
    """Attention and feed-forward, each behind a norm and added to the stream."""

    def __init__(self, shape: ModelShape, make: Maker, layer: int):
        name = f"blocks.{layer}"
        self.attention_norm = RMSNorm(shape, make, f"{name}.attention_norm")
        self.attention = Attention(shape, make, f"{name}.attention", layer)
        self.feed_forward_norm = RMSNorm(shape, make, f"{name}.feed_forward_norm")
        kind = Experts if shape.has_experts(layer) else FeedForward
        self.feed_forward = kind(shape, make, f"{name}.feed_forward")

    def __call__(
        self, x: Float[Array, "B T E"], pages: Shaped[Array, "P L C ..."], step: Step
    ) -> tuple[Float[Array, "B T E"], Shaped[Array, "P L C ..."]]:
        mixed, pages = self.attention(self.attention_norm(x), pages, step)
        x = x + mixed
        return x + self.feed_forward(self.feed_forward_norm(x), step), pages
