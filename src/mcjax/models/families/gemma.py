"""Gemma 2 (arXiv:2408.00118) and 3 (arXiv:2503.19786): what attention and feed-forward give is normalised too."""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float, Shaped

from mcjax.cost.model_shape import ModelShape
from mcjax.models.layers.attention import Attention
from mcjax.models.layers.feed_forward import FeedForward
from mcjax.models.layers.norm import RMSNorm
from mcjax.models.layers.step import Step
from mcjax.models.weights import Maker


class Block(nnx.Module):
    """Attention and feed-forward, each between two norms and added to the stream."""

    def __init__(self, shape: ModelShape, make: Maker, layer: int):
        name = f"blocks.{layer}"
        self.attention_norm = RMSNorm(shape, make, f"{name}.attention_norm")
        self.attention = Attention(shape, make, f"{name}.attention", layer)
        self.attention_post_norm = RMSNorm(shape, make, f"{name}.attention_post_norm")
        self.feed_forward_norm = RMSNorm(shape, make, f"{name}.feed_forward_norm")
        self.feed_forward = FeedForward(shape, make, f"{name}.feed_forward")
        self.feed_forward_post_norm = RMSNorm(shape, make, f"{name}.feed_forward_post_norm")

    def __call__(
        self, x: Float[Array, "B T E"], pages: Shaped[Array, "P L C ..."], step: Step
    ) -> tuple[Float[Array, "B T E"], Shaped[Array, "P L C ..."]]:
        mixed, pages = self.attention(self.attention_norm(x), pages, step)
        x = x + self.attention_post_norm(mixed)
        fed = self.feed_forward(self.feed_forward_norm(x), step)
        return x + self.feed_forward_post_norm(fed), pages
