"""Every parameter of a decoder, declared once: its shape, what its axes are, how it begins. Free of jax.

Counts, abstract models, shardings, random weights and the readers of checkpoints all come from here. Names are those of
the attributes that hold the arrays (`blocks.0.attention.mix`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mcjax.cost.architecture import Latent
from mcjax.cost.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class Parameter:
    """One array. `axes` has a name for each dimension that may be spread over devices (`models/sharding.py`)."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    fan_in: int = 0
    """Inputs that are summed with it; 0: it is no matrix."""
    init: Literal["uniform", "ones", "zeros"] = "uniform"
    summed: tuple[int, ...] = ()
    """Dimensions that a product sums over, of what may be quantised; the others are output channels, each of which has
    a scale of its own. Empty: always plain."""

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ValueError(f"{len(self.axes)} axes for {len(self.shape)} dimensions")

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def parameters(shape: ModelShape) -> dict[str, Parameter]:
    """By name, in the order in which a model asks for them."""
    return dict(_all(shape))


def stored_bytes(parameter: Parameter, shape: ModelShape) -> int:
    """Of one parameter as a device holds it; a scale has four."""
    if shape.quantisation == "none" or not parameter.summed:
        return parameter.size * shape.dtype_bytes
    return parameter.size + 4 * parameter.size // math.prod(parameter.shape[at] for at in parameter.summed)


def attention_matrices(shape: ModelShape) -> int:
    """Numbers in the matrices of one layer's attention."""
    return sum(parameter.size for _, parameter in _attention(shape) if parameter.summed)


def _gain(size: int, shape: ModelShape) -> Parameter:
    return Parameter((size,), (None,), init="zeros" if shape.unit_offset_norms else "ones")


def _all(shape: ModelShape) -> Iterator[tuple[str, Parameter]]:
    embed = shape.d_model
    yield "embedding", Parameter((shape.vocab, embed), ("vocab", None), 1, summed=(1,))
    for layer in range(shape.layers):
        for name, parameter in _block(shape, layer):
            yield f"blocks.{layer}.{name}", parameter
    yield "final_norm.gain", _gain(embed, shape)
    if not shape.tied_embeddings:
        yield "head", Parameter((shape.vocab, embed), ("vocab", None), embed, summed=(1,))


def _block(shape: ModelShape, layer: int) -> Iterator[tuple[str, Parameter]]:
    embed = shape.d_model
    yield "attention_norm.gain", _gain(embed, shape)
    for name, parameter in _attention(shape):
        yield f"attention.{name}", parameter
    if shape.sandwich_norms:
        yield "attention_post_norm.gain", _gain(embed, shape)
    yield "feed_forward_norm.gain", _gain(embed, shape)
    for name, parameter in _experts(shape) if shape.has_experts(layer) else _dense(embed, shape.d_ff):
        yield f"feed_forward.{name}", parameter
    if shape.sandwich_norms:
        yield "feed_forward_post_norm.gain", _gain(embed, shape)


def _attention(shape: ModelShape) -> Iterator[tuple[str, Parameter]]:
    embed, kv_heads, dim = shape.d_model, shape.kv_heads, shape.head_dim
    if shape.latent:
        yield from _latent_attention(shape, shape.latent)
        return
    # [E, Hkv, G + 2, D]: one product instead of three, and whoever splits key heads over devices splits it all.
    mixed = shape.heads // kv_heads + 2
    yield "mix", Parameter((embed, kv_heads, mixed, dim), (None, "kv_heads", None, None), embed, summed=(0,))
    if shape.attention_bias:
        yield "mix_bias", Parameter((kv_heads, mixed, dim), ("kv_heads", None, None), init="zeros")
    if shape.qk_norm:
        yield "query_norm.gain", _gain(dim, shape)
        yield "key_norm.gain", _gain(dim, shape)
    yield "output", Parameter((shape.heads, dim, embed), ("heads", None, None), shape.heads * dim, summed=(0, 1))


def _dense(embed: int, width: int) -> Iterator[tuple[str, Parameter]]:
    yield "gate_up", Parameter((embed, 2, width), (None, None, "d_ff"), embed, summed=(0,))
    yield "down", Parameter((width, embed), ("d_ff", None), width, summed=(0,))


def _experts(shape: ModelShape) -> Iterator[tuple[str, Parameter]]:
    embed, count, width = shape.d_model, shape.experts, shape.expert_d_ff or shape.d_ff
    yield "router", Parameter((embed, count), (None, None), embed)  # plain: a score that is off is another choice
    if shape.routing.bias:
        yield "router_bias", Parameter((count,), (None,), init="zeros")
    yield "gate_up", Parameter((count, embed, 2, width), ("experts", None, None, "d_ff"), embed, summed=(1,))
    yield "down", Parameter((count, width, embed), ("experts", "d_ff", None), width, summed=(1,))
    if shape.shared_experts:
        for name, parameter in _dense(embed, shape.shared_experts * width):
            yield f"shared.{name}", parameter


def _latent_attention(shape: ModelShape, latent: Latent) -> Iterator[tuple[str, Parameter]]:
    embed, heads, rank, nope = shape.d_model, shape.heads, latent.kv_rank, latent.nope_dim
    inputs = embed
    if latent.query_rank:
        inputs = latent.query_rank
        yield "query_down", Parameter((embed, inputs), (None, None), embed, summed=(0,))
        yield "query_norm.gain", _gain(inputs, shape)
    queries = (inputs, heads, nope + latent.rope_dim)
    yield "query", Parameter(queries, (None, "heads", None), inputs, summed=(0,))
    yield "latent_down", Parameter((embed, latent.cache_dim), (None, None), embed, summed=(0,))
    yield "latent_norm.gain", _gain(rank, shape)
    yield "key_up", Parameter((heads, nope, rank), ("heads", None, None), rank, summed=(1,))
    yield "value_up", Parameter((heads, rank, latent.value_dim), ("heads", None, None), rank, summed=(1,))
    values = heads * latent.value_dim
    yield "output", Parameter((heads, latent.value_dim, embed), ("heads", None, None), values, summed=(0, 1))
