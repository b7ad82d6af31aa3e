"""A decoder over paged KV, in flax.nnx: embeddings, a family's blocks, logits.

A page holds one block of tokens of *all* layers; as it leaves the device, `[L, C, page, Hkv, D]`, its bytes are one KV
block of the pool. The last page of the array is scratch: padding writes there, and nobody reads it unmasked. How pages
lie on the device, and what reads and writes them, is the business of the kernels that the caller hands in.
"""

from __future__ import annotations

import importlib
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Shaped

from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError
from mcjax.kernels import base
from mcjax.models.layers.linear import einsum
from mcjax.models.layers.norm import RMSNorm
from mcjax.models.layers.rotary import rotary_table
from mcjax.models.layers.step import Step
from mcjax.models.quantised import QuantArray
from mcjax.models.weights import Maker, WeightSource


def check_served(shape: ModelShape) -> None:
    """Raises `ConfigError` for a shape that counts, and that no model here computes."""
    _ = shape.dtype
    if shape.kv_dtype_bytes != shape.dtype_bytes:
        raise ConfigError("model.kv_dtype_bytes", shape.kv_dtype_bytes, "must equal model.dtype_bytes here")
    if shape.head_dim % 2:
        raise ConfigError("model.head_dim", shape.head_dim, "rotary positions need an even size")


class Decoder(nnx.Module):
    """The whole model. `max_positions` bounds the rotary tables, hence the context."""

    def __init__(self, shape: ModelShape, max_positions: int, source: WeightSource):
        check_served(shape)
        make = Maker(shape, source)
        self.shape = shape
        self.embedding = nnx.Param(make("embedding"))
        block: Any = importlib.import_module(f"mcjax.models.families.{shape.family}").Block
        self.blocks = nnx.List([block(shape, make, layer) for layer in range(shape.layers)])
        self.final_norm = RMSNorm(shape, make, "final_norm")
        self.head = None if shape.tied_embeddings else nnx.Param(make("head"))
        turned = shape.latent.rope_dim if shape.latent else shape.head_dim
        self.rotary = nnx.Variable(rotary_table(shape.rotary, turned, max_positions))
        local = shape.local_rope
        self.local_rotary = nnx.Variable(rotary_table(local, turned, max_positions)) if local else None

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        pages: Shaped[Array, "P L C ..."],
        page_table: Int[Array, "B N"],
        lengths: Int[Array, " B"],
        attend: base.Attention,
        flat: bool = True,
    ) -> tuple[Float[Array, "B V"], Shaped[Array, "P L C ..."]]:
        """Logits (float32) after each row's last valid token, and the pages with the new keys and values in them.

        Row b holds `lengths[b]` valid tokens, then padding, whose position is -1. Page ids in `page_table` are below
        `P - 1`; unused entries may name any page. Logits of a row without valid tokens mean nothing. `flat` is
        `linear.einsum`'s.
        """
        x, pages = self.stream(tokens, positions, pages, page_table, attend, flat)
        last = jnp.maximum(lengths - 1, 0)[:, None, None]
        return self.logits(jnp.take_along_axis(x, last, axis=1)[:, 0], flat), pages

    def stream(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        pages: Shaped[Array, "P L C ..."],
        page_table: Int[Array, "B N"],
        attend: base.Attention,
        flat: bool = True,
    ) -> tuple[Float[Array, "B T E"], Shaped[Array, "P L C ..."]]:
        """What the last block gives for every token, and the pages; all as `__call__` has it."""
        place = jnp.maximum(positions, 0)
        turn = self.rotary[...][place]
        local_turn = turn if self.local_rotary is None else self.local_rotary[...][place]
        step = Step(positions, page_table, turn, local_turn, attend, flat)
        x = self._embed(tokens)
        for block in self.blocks:
            x, pages = block(x, pages, step)
        return x, pages

    def logits(self, x: Float[Array, "B E"], flat: bool = True) -> Float[Array, "B V"]:
        """Of tokens whose stream is `x`, in float32."""
        head = self.embedding if self.head is None else self.head
        logits = einsum("be,ve->bv", self.final_norm(x), head[...], flat)
        if cap := self.shape.logits_soft_cap:
            logits = jnp.tanh(logits / cap) * cap
        return logits

    def _embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
        table = self.embedding[...]
        dtype = jnp.dtype(self.shape.dtype)
        x = table[tokens]
        if isinstance(x, QuantArray):
            x = x.plain(dtype)
        if self.shape.embedding_scale == 1:
            return x
        return x * np.asarray(self.shape.embedding_scale, dtype)
