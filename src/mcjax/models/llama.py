"""The Llama architecture over paged KV, in flax.nnx: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

A page holds one block of tokens of *all* layers; as it leaves the device, `[L, 2, page, Hkv, D]`, its bytes are one KV
block of the pool. The last page of the array is scratch: padding writes there, and nobody reads it unmasked. How pages
lie on the device, and what reads and writes them, is the business of the kernels that the caller hands in.
Source: Touvron et al. 2023 (arXiv:2302.13971), grouped queries from arXiv:2307.09288.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Shaped

from mcjax.errors import ConfigError
from mcjax.kernels import base


class Shape(Protocol):
    """The fields of `mcjax.cost.model_shape.ModelShape` that an architecture needs."""

    @property
    def layers(self) -> int: ...
    @property
    def d_model(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def d_ff(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def tied_embeddings(self) -> bool: ...
    @property
    def dtype_bytes(self) -> int: ...
    @property
    def kv_dtype_bytes(self) -> int: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def norm_eps(self) -> float: ...


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of one model. `dtype` is that of weights, activations and KV; sums are always in float32."""

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    vocab: int
    tied_embeddings: bool = True
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("layers", "d_model", "heads", "kv_heads", "head_dim", "d_ff", "vocab"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}", getattr(self, name), "must be at least 1")
        if self.heads % self.kv_heads:
            raise ConfigError("model.heads", self.heads, f"must be a multiple of model.kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ConfigError("model.head_dim", self.head_dim, "rotary positions need an even size")
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError("model.dtype", self.dtype, "not supported", ("float32", "bfloat16"))

    @classmethod
    def from_shape(cls, shape: Shape) -> LlamaConfig:
        """The config of a model shape.

        Raises `ConfigError` for a shape that is no dense Llama, or whose KV is of another width than its weights.
        """
        dtypes = {4: "float32", 2: "bfloat16"}
        if shape.experts or shape.qk_norm:
            raise ConfigError("model", type(shape).__name__, "has experts or normalised queries: not a dense Llama")
        if shape.dtype_bytes not in dtypes:
            raise ConfigError("model.dtype_bytes", shape.dtype_bytes, "no such dtype here", dtypes)
        if shape.kv_dtype_bytes != shape.dtype_bytes:
            raise ConfigError("model.kv_dtype_bytes", shape.kv_dtype_bytes, "must equal model.dtype_bytes here")
        return cls(
            layers=shape.layers,
            d_model=shape.d_model,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            d_ff=shape.d_ff,
            vocab=shape.vocab,
            tied_embeddings=shape.tied_embeddings,
            rope_theta=shape.rope_theta,
            norm_eps=shape.norm_eps,
            dtype=dtypes[shape.dtype_bytes],
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of all layers, for one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize

    def page_shape(self, page_tokens: int) -> tuple[int, int, int, int, int]:
        """`[L, 2, page, Hkv, D]`, the shape of one page as a canonical block."""
        return (self.layers, 2, page_tokens, self.kv_heads, self.head_dim)

    def items(self) -> dict[str, int | float | bool | str]:
        """Field by field, for fingerprints and logs."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


class WeightSource(Protocol):
    """Where weights come from: asked once a parameter, by dotted name. `fan_in` counts summed inputs (0: a gain)."""

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Array: ...


def contract(x: Float[Array, "*rows K"], weight: Float[Array, "K N"]) -> Float[Array, "*rows N"]:
    """`x @ weight`, summed in float32, in the dtype of `x`."""
    product = wide_product(x.reshape(-1, x.shape[-1]), weight)
    return product.astype(x.dtype).reshape(*x.shape[:-1], weight.shape[1])


def wide_product(x: Float[Array, "M K"], weight: Float[Array, "..."], summed_axis: int = 0) -> Float[Array, "M ..."]:
    """Float32 sums of products of each row with the weight's other axes: of `[K, N]`, of `[N, K]` or `[K, N, ..]`.

    Float32 weights ask for full float32 products, which accelerators otherwise round. On XLA:CPU a bfloat16 product
    that is *summed* in bfloat16 is the slow path, and so is one of a single row: such a row is computed twice.
    """
    count = x.shape[0]
    if count == 1 and weight.dtype == jnp.bfloat16 and jax.default_backend() == "cpu":
        x = jnp.broadcast_to(x, (2, x.shape[1]))
    precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    axes = (((1,), (summed_axis,)), ((), ()))
    return jax.lax.dot_general(x, weight, axes, precision=precision, preferred_element_type=jnp.float32)[:count]


def rotary_table(config: LlamaConfig, length: int) -> Float[Array, "S 2 D/2"]:
    """Cosine and sine of every position below `length`, computed in float64.

    A table and not a formula inside the program: a vectorised cosine may round its last lanes otherwise, and then a
    token's bits would depend on its place in the chunk.
    """
    frequencies = config.rope_theta ** (-np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    angles = np.arange(length, dtype=np.float64)[:, None] * frequencies
    return jnp.asarray(np.stack([np.cos(angles), np.sin(angles)], axis=1), dtype=jnp.float32)


def rotate(x: Float[Array, "B T H D"], turn: Float[Array, "B T 2 D/2"]) -> Float[Array, "B T H D"]:
    """Turn each pair (i, i + D/2) of `x` by its position's angle."""
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = turn[:, :, None, 0], turn[:, :, None, 1]
    return jnp.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1).astype(x.dtype)


class RMSNorm(nnx.Module):
    """`x / rms(x) * gain`, in float32."""

    def __init__(self, config: LlamaConfig, source: WeightSource, name: str):
        self.gain = nnx.Param(source(f"{name}.gain", (config.d_model,), 0))
        self.eps = config.norm_eps

    def __call__(self, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * scale * self.gain[...].astype(jnp.float32)).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention: the products around a kernel that writes keys and values into pages, and attends."""

    def __init__(self, config: LlamaConfig, source: WeightSource, name: str, layer: int):
        embed, head_dim, kv_heads = config.d_model, config.head_dim, config.kv_heads
        self.layer, self.kv_heads, self.head_dim = layer, kv_heads, head_dim
        query = source(f"{name}.query", (embed, config.heads, head_dim), embed)
        key = source(f"{name}.key", (embed, kv_heads, head_dim), embed)
        value = source(f"{name}.value", (embed, kv_heads, head_dim), embed)
        grouped = query.reshape(embed, kv_heads, -1, head_dim)
        # [E, Hkv, G + 2, D]: one product instead of three, and whoever splits key heads over devices splits it all.
        self.mix = nnx.Param(jnp.concatenate([grouped, key[:, :, None], value[:, :, None]], axis=2))
        output = source(f"{name}.output", (config.heads, head_dim, embed), config.heads * head_dim)
        self.output = nnx.Param(output)

    def __call__(
        self,
        x: Float[Array, "B T E"],
        turn: Float[Array, "B T 2 D/2"],
        positions: Int[Array, "B T"],
        pages: Shaped[Array, "P L 2 ..."],
        page_table: Int[Array, "B N"],
        attend: base.Attention,
    ) -> tuple[Float[Array, "B T E"], Shaped[Array, "P L 2 ..."]]:
        batch, steps, embed = x.shape
        mixed = contract(x, self.mix[...].reshape(embed, -1)).reshape(batch, steps, self.kv_heads, -1, self.head_dim)
        queries = rotate(mixed[:, :, :, :-2].reshape(batch, steps, -1, self.head_dim), turn)
        keys, values = rotate(mixed[:, :, :, -2], turn), mixed[:, :, :, -1]
        attended, pages = attend(queries, keys, values, pages, self.layer, page_table, positions)
        return contract(attended.reshape(batch, steps, -1), self.output[...].reshape(-1, embed)), pages


class FeedForward(nnx.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: LlamaConfig, source: WeightSource, name: str):
        gate = source(f"{name}.gate", (config.d_model, config.d_ff), config.d_model)
        up = source(f"{name}.up", (config.d_model, config.d_ff), config.d_model)
        self.gate_up = nnx.Param(jnp.stack([gate, up], axis=1))  # [E, 2, F]
        self.down = nnx.Param(source(f"{name}.down", (config.d_ff, config.d_model), config.d_ff))

    def __call__(self, x: Float[Array, "B T E"], flat: bool) -> Float[Array, "B T E"]:
        if flat:
            gate, up = jnp.split(contract(x, self.gate_up[...].reshape(x.shape[-1], -1)), 2, axis=-1)
        else:
            both = wide_product(x.reshape(-1, x.shape[-1]), self.gate_up[...]).astype(x.dtype)
            gate, up = (both[:, half].reshape(*x.shape[:-1], -1) for half in range(2))
        return contract(jax.nn.silu(gate) * up, self.down[...])


class Block(nnx.Module):
    """One layer: attention and feed-forward, each behind a norm and added to the stream."""

    def __init__(self, config: LlamaConfig, source: WeightSource, layer: int):
        name = f"blocks.{layer}"
        self.attention_norm = RMSNorm(config, source, f"{name}.attention_norm")
        self.attention = Attention(config, source, f"{name}.attention", layer)
        self.feed_forward_norm = RMSNorm(config, source, f"{name}.feed_forward_norm")
        self.feed_forward = FeedForward(config, source, f"{name}.feed_forward")


class Llama(nnx.Module):
    """The whole model. `max_positions` bounds the rotary table, hence the context."""

    def __init__(self, config: LlamaConfig, max_positions: int, source: WeightSource):
        self.config = config
        self.embedding = nnx.Param(source("embedding", (config.vocab, config.d_model), 1))
        self.blocks = nnx.List([Block(config, source, layer) for layer in range(config.layers)])
        self.final_norm = RMSNorm(config, source, "final_norm")
        head_shape = (config.vocab, config.d_model)
        self.head = None if config.tied_embeddings else nnx.Param(source("head", head_shape, config.d_model))
        self.rotary = nnx.Variable(rotary_table(config, max_positions))

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        pages: Shaped[Array, "P L 2 ..."],
        page_table: Int[Array, "B N"],
        lengths: Int[Array, " B"],
        attend: base.Attention,
        flat: bool = True,
    ) -> tuple[Float[Array, "B V"], Shaped[Array, "P L 2 ..."]]:
        """Logits (float32) after each row's last valid token, and the pages with the new keys and values in them.

        Row b holds `lengths[b]` valid tokens, then padding, whose position is -1. Page ids in `page_table` are below
        `P - 1`; unused entries may name any page. Logits of a row without valid tokens mean nothing.

        `flat`: multiply by matrices only. XLA:CPU transposes any other weight at every call; but a matrix of two halves
        side by side, each spread over devices, has to be exchanged between them at every call.
        """
        turn = self.rotary[...][jnp.maximum(positions, 0)]
        x = self.embedding[...][tokens]
        for block in self.blocks:
            mixed, pages = block.attention(block.attention_norm(x), turn, positions, pages, page_table, attend)
            x = x + mixed
            x = x + block.feed_forward(block.feed_forward_norm(x), flat)
        last = jnp.maximum(lengths - 1, 0)[:, None, None]
        final = self.final_norm(jnp.take_along_axis(x, last, axis=1))
        head = self.embedding if self.head is None else self.head
        logits = wide_product(final[:, 0], head[...], summed_axis=1)
        return logits, pages
