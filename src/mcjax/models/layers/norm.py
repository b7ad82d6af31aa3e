"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mcjax.cost.model_shape import ModelShape
from mcjax.models.weights import Maker


class RMSNorm(nnx.Module):
    """`x / rms(x) * gain` over the last axis, in float32; Gemma's multiply by `1 + gain`."""

    def __init__(self, shape: ModelShape, make: Maker, name: str):
        self.gain = nnx.Param(make(f"{name}.gain"))
        self.eps, self.offset = shape.norm_eps, float(shape.unit_offset_norms)

    def __call__(self, x: Float[Array, "*B E"]) -> Float[Array, "*B E"]:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * scale * (self.gain[...].astype(jnp.float32) + self.offset)).astype(x.dtype)
