"""Where Hugging Face checkpoints hold a decoder's pieces, under which names and how turned. Free of jax.

Their matrices are `[out, in]`. Experts come in three ways: a tensor an expert (Qwen3-MoE, DeepSeek-V3), the same under
Mixtral's own names, or all experts in one tensor with gate and up joined, as transformers 5 holds them in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mcjax.cost.architecture import Latent
from mcjax.cost.model_shape import ModelShape
from mcjax.cost.parameters import parameters
from mcjax.models.pieces import Piece, pieces

Numbers: TypeAlias = NDArray[Any]

_BLOCK = {
    "attention_norm.gain": "input_layernorm.weight",
    "attention.query": "self_attn.q_proj.weight",
    "attention.key": "self_attn.k_proj.weight",
    "attention.value": "self_attn.v_proj.weight",
    "attention.query_bias": "self_attn.q_proj.bias",
    "attention.key_bias": "self_attn.k_proj.bias",
    "attention.value_bias": "self_attn.v_proj.bias",
    "attention.query_norm.gain": "self_attn.q_norm.weight",
    "attention.key_norm.gain": "self_attn.k_norm.weight",
    "attention.output": "self_attn.o_proj.weight",
    "feed_forward_norm.gain": "post_attention_layernorm.weight",
    "feed_forward.gate": "mlp.gate_proj.weight",
    "feed_forward.up": "mlp.up_proj.weight",
    "feed_forward.down": "mlp.down_proj.weight",
    "feed_forward.router": "mlp.gate.weight",
    "feed_forward.router_bias": "mlp.gate.e_score_correction_bias",
    "feed_forward.shared.gate": "mlp.shared_experts.gate_proj.weight",
    "feed_forward.shared.up": "mlp.shared_experts.up_proj.weight",
    "feed_forward.shared.down": "mlp.shared_experts.down_proj.weight",
}
_SANDWICH = {
    "attention_post_norm.gain": "post_attention_layernorm.weight",
    "feed_forward_norm.gain": "pre_feedforward_layernorm.weight",
    "feed_forward_post_norm.gain": "post_feedforward_layernorm.weight",
}
_LATENT = {
    "attention.query_down": "self_attn.q_a_proj.weight",
    "attention.query_norm.gain": "self_attn.q_a_layernorm.weight",
    "attention.latent_down": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.latent_norm.gain": "self_attn.kv_a_layernorm.weight",
    "attention.key_up": "self_attn.kv_b_proj.weight",
    "attention.value_up": "self_attn.kv_b_proj.weight",
}
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """What differs between checkpoints of one architecture."""

    prefix: str = "model."
    """Before `layers` and `embed_tokens`."""
    experts: Literal["separate", "mixtral", "fused"] = "separate"

    @property
    def head(self) -> str:
        """Name of the output weights: beside the decoder, also where that is a part of something larger."""
        return "language_model.lm_head.weight" if self.prefix == "language_model.model." else "lm_head.weight"


def dialect(names: Collection[str]) -> Dialect:
    """That of a checkpoint with tensors of these names."""
    last = "embed_tokens.weight"
    found = (name.removesuffix(last) for name in names if name.endswith(last))
    prefix = min(found, key=len, default="model.")  # layers that predict further tokens have embeddings too
    if any(name.endswith(".experts.gate_up_proj") for name in names):
        return Dialect(prefix, "fused")
    return Dialect(prefix, "mixtral" if any(".block_sparse_moe." in name for name in names) else "separate")


@dataclass(frozen=True, slots=True)
class Stored:
    """What a piece is read from."""

    tensors: tuple[str, ...]
    """One; or where `stacked` one for each row of the piece's first dimension, its expert."""
    shape: tuple[int, ...]
    """Of each tensor."""
    arrange: Callable[[Numbers], Numbers]
    """From a tensor to the piece, or to its row of it. Views where that is possible."""
    stacked: bool = False

    def read(self, get: Callable[[str], Numbers]) -> Numbers:
        """The piece; `get` gives a tensor by its name."""
        rows = [self.arrange(get(name)) for name in self.tensors]
        return np.stack(rows) if self.stacked else rows[0]


def stored(shape: ModelShape, dialect: Dialect) -> dict[str, Stored]:
    """By the name of the piece. Two pieces may be read from one tensor."""
    return {
        piece.name: _stored(shape, dialect, piece)
        for name, parameter in parameters(shape).items()
        for piece in pieces(name, parameter)
    }


def unused(shape: ModelShape, dialect: Dialect, names: Collection[str]) -> set[str]:
    """Those of `names` that checkpoints hold, and that a decoder does without on purpose.

    Tables of rotary frequencies; output weights that are the embeddings again; layers that predict further tokens
    (DeepSeek-V3, arXiv:2412.19437, 2.2); what sees pictures (Gemma 3).
    """
    layer_of = re.compile(re.escape(dialect.prefix) + r"layers\.(\d+)\.")
    further = {
        found[1] for name in names if name.endswith(".eh_proj.weight") and (found := layer_of.match(name)) is not None
    }
    result: set[str] = set()
    for name in names:
        found = layer_of.match(name)
        predicts_further = found is not None and found[1] in further and int(found[1]) >= shape.layers
        sees = "language_model" in dialect.prefix and re.match(
            r"(model\.)?(vision_tower|multi_modal_projector)\.", name
        )
        tied = shape.tied_embeddings and name == dialect.head
        if predicts_further or sees or tied or name.endswith(".rotary_emb.inv_freq"):
            result.add(name)
    return result


def _stored(shape: ModelShape, dialect: Dialect, piece: Piece) -> Stored:
    if piece.name == "head":
        return Stored((dialect.head,), piece.shape, _same)
    if piece.name == "embedding":
        return Stored((f"{dialect.prefix}embed_tokens.weight",), piece.shape, _same)
    if piece.name == "final_norm.gain":
        return Stored((f"{dialect.prefix}norm.weight",), piece.shape, _same)
    _, layer, inside = piece.name.split(".", 2)
    block = f"{dialect.prefix}layers.{layer}."
    if shape.has_experts(int(layer)) and inside.startswith("feed_forward."):
        part = inside.removeprefix("feed_forward.")
        if part in ("gate", "up", "down"):
            return _experts(dialect, block, part, piece)
        if part == "router" and dialect.experts == "mixtral":
            return _matrix(f"{block}block_sparse_moe.gate.weight", piece)
    names = _BLOCK | (_SANDWICH if shape.sandwich_norms else {}) | (_LATENT if shape.latent else {})
    if shape.latent and inside in (
        "attention.query",
        "attention.latent_down",
        "attention.key_up",
        "attention.value_up",
    ):
        name = "self_attn.q_b_proj.weight" if inside == "attention.query" and shape.latent.query_rank else names[inside]
        return _latent(shape, shape.latent, block + name, inside.removeprefix("attention."), piece)
    if piece.fan_in:
        return _matrix(block + names[inside], piece)
    return Stored((block + names[inside],), (int(np.prod(piece.shape)),), lambda tensor: tensor.reshape(piece.shape))


def _same(tensor: Numbers) -> Numbers:
    return tensor


def _matrix(name: str, piece: Piece) -> Stored:
    outputs = int(np.prod(piece.shape)) // piece.fan_in
    return Stored((name,), (outputs, piece.fan_in), lambda tensor: tensor.T.reshape(piece.shape))


def _experts(dialect: Dialect, block: str, part: str, piece: Piece) -> Stored:
    count, inputs, outputs = piece.shape
    if dialect.experts == "fused":
        name = f"{block}mlp.experts.{'down_proj' if part == 'down' else 'gate_up_proj'}"
        if part == "down":
            return Stored((name,), (count, outputs, inputs), lambda tensor: tensor.swapaxes(1, 2))
        half = slice(0, outputs) if part == "gate" else slice(outputs, None)
        return Stored((name,), (count, 2 * outputs, inputs), lambda tensor: tensor[:, half].swapaxes(1, 2))
    if dialect.experts == "mixtral":
        names = [f"{block}block_sparse_moe.experts.{expert}.{_MIXTRAL[part]}.weight" for expert in range(count)]
    else:
        names = [f"{block}mlp.experts.{expert}.{part}_proj.weight" for expert in range(count)]
    return Stored(tuple(names), (outputs, inputs), lambda tensor: tensor.T, stacked=True)


def _latent(shape: ModelShape, latent: Latent, name: str, part: str, piece: Piece) -> Stored:
    rope, nope = latent.rope_dim, latent.nope_dim
    if part in ("query", "latent_down"):  # their last `rope` outputs are rotary, of a head or of the token
        matrix = _matrix(name, piece)
        return Stored((name,), matrix.shape, lambda tensor: _halves(matrix.arrange(tensor), rope))
    per_head = (shape.heads, nope + latent.value_dim, latent.kv_rank)

    def arrange(tensor: Numbers) -> Numbers:
        both = tensor.reshape(per_head)
        return both[:, :nope] if part == "key_up" else both[:, nope:].swapaxes(1, 2)

    return Stored((name,), (per_head[0] * per_head[1], per_head[2]), arrange)


def _halves(numbers: Numbers, rope: int) -> Numbers:
    """The last `rope` of the last dimension, where neighbours (2i, 2i + 1) turn together, as pairs (i, i + rope/2)."""
    plain, turned = numbers[..., :-rope], numbers[..., -rope:]
    return np.concatenate([plain, turned[..., 0::2], turned[..., 1::2]], axis=-1)
