"""What training leaves: a Hugging Face model directory, in bfloat16, with a card that says how it came to be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from numpy.typing import NDArray

from mcjax.cost.model_shape import ModelShape
from mcjax.cost.parameters import parameters
from mcjax.models.byte_tokenizer import ByteTokenizer
from mcjax.models.hugging_face import Dialect, stored
from mcjax.models.pieces import parted, pieces
from mcjax.models.tokenizer import BYTES
from mcjax.models.training.loop import write

CARD, WEIGHTS = "card.json", "model.safetensors"


def write_directory(path: Path, shape: ModelShape, values: dict[str, Array], card: dict[str, Any]) -> None:
    """The directory `path`, as `model.checkpoint` wants it; transformers reads the model too."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: jnp.asarray(value, jnp.bfloat16) for name, value in _tensors(shape, values).items()}
    write(path / WEIGHTS, tensors, {"format": "pt"})  # transformers reads no file that does not say so
    said = {"config.json": _config(shape), "tokenizer_config.json": {"tokenizer_class": BYTES}, CARD: card}
    for name, content in said.items():
        (path / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def rounded(values: dict[str, Array]) -> dict[str, Array]:
    """Parameters as they are once they are written and read again."""
    return {name: value.astype(jnp.bfloat16).astype(value.dtype) for name, value in values.items()}


def _tensors(shape: ModelShape, values: dict[str, Array]) -> dict[str, NDArray[Any]]:
    """Matrices as checkpoints have them, `[out, in]`."""
    places, found = stored(shape, Dialect()), {}
    for name, parameter in parameters(shape).items():
        for piece, part in zip(pieces(name, parameter), parted(name, np.asarray(values[name])), strict=True):
            turned = piece.fan_in > 1 and piece.name != "head"
            matrix = part.reshape(piece.fan_in, -1).T if turned else part
            found[places[piece.name].tensors[0]] = matrix.reshape(places[piece.name].shape)
    return found


def _config(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.d_model,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.d_ff,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied_embeddings,
        "max_position_embeddings": shape.max_context_tokens,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
        "bos_token_id": ByteTokenizer.begin,
        "eos_token_id": ByteTokenizer.end,
        "pad_token_id": ByteTokenizer.padding,
        "dtype": "bfloat16",
    }
