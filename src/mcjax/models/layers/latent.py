"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, 2.1), in absorbed form.

A layer caches one vector a token: a normalised latent, of which all heads' keys and values are linear functions, beside
one rotated key that all heads share. A head's query meets the latent itself, since `q . (U c) = (U^T q) . c`, and its
values are made of the mix of latents: the matrices that would make keys and values are *absorbed* by those of queries
and outputs. So attention is that of many heads over one key head, whose keys are its values too.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Shaped

from mcjax.cost.model_shape import ModelShape
from mcjax.models.layers.linear import einsum
from mcjax.models.layers.norm import RMSNorm
from mcjax.models.layers.rotary import rotate
from mcjax.models.layers.step import Step
from mcjax.models.weights import Maker


class LatentAttention(nnx.Module):
    """One layer's. Queries are compressed too, if the shape says so."""

    def __init__(self, shape: ModelShape, make: Maker, name: str, layer: int):
        latent = shape.latent
        assert latent is not None
        self.layer = layer
        self.kv_rank, self.nope_dim = latent.kv_rank, latent.nope_dim
        # A kernel's own would be that of the entry's width, which is not that of the heads.
        self.scale = shape.query_scale or shape.head_dim**-0.5
        compressed = latent.query_rank > 0
        self.query_down = nnx.Param(make(f"{name}.query_down")) if compressed else None
        self.query_norm = RMSNorm(shape, make, f"{name}.query_norm") if compressed else None
        self.query = nnx.Param(make(f"{name}.query"))
        self.latent_down = nnx.Param(make(f"{name}.latent_down"))
        self.latent_norm = RMSNorm(shape, make, f"{name}.latent_norm")
        self.key_up = nnx.Param(make(f"{name}.key_up"))
        self.value_up = nnx.Param(make(f"{name}.value_up"))
        self.output = nnx.Param(make(f"{name}.output"))

    def __call__(
        self, x: Float[Array, "B T E"], pages: Shaped[Array, "P L C ..."], step: Step
    ) -> tuple[Float[Array, "B T E"], Shaped[Array, "P L C ..."]]:
        entry = self._entry(x, step)
        attended, pages = step.attend(
            self._queries(x, step), entry, entry, pages, self.layer, step.page_table, step.positions, scale=self.scale
        )
        mixed = attended[..., : self.kv_rank]
        values = einsum("bthr,hrd->bthd", mixed, self.value_up[...], step.flat).astype(x.dtype)
        return einsum("bthd,hde->bte", values, self.output[...]).astype(x.dtype), pages

    def _queries(self, x: Float[Array, "B T E"], step: Step) -> Float[Array, "B T H D"]:
        """`[what meets latents | what meets rotated keys]` of each head."""
        if self.query_down is not None and self.query_norm is not None:
            x = self.query_norm(einsum("bte,ei->bti", x, self.query_down[...], step.flat).astype(x.dtype))
        queries = einsum("bti,ihd->bthd", x, self.query[...], step.flat).astype(x.dtype)
        plain, turned = queries[..., : self.nope_dim], rotate(queries[..., self.nope_dim :], step.turn)
        absorbed = einsum("bthn,hnr->bthr", plain, self.key_up[...], step.flat).astype(x.dtype)
        return jnp.concatenate([absorbed, turned], axis=-1)

    def _entry(self, x: Float[Array, "B T E"], step: Step) -> Float[Array, "B T 1 D"]:
        """What the cache keeps of each token."""
        down = einsum("bte,ei->bti", x, self.latent_down[...], step.flat).astype(x.dtype)
        latent, key = self.latent_norm(down[..., : self.kv_rank]), down[..., self.kv_rank :]
        return jnp.concatenate([latent[:, :, None], rotate(key[:, :, None], step.turn)], axis=-1)
