"""The weights of a Llama in a GGUF file, as `mcjax.models.decoder` asks for them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError
from mcjax.models.checkpoint import KEY
from mcjax.models.gguf_file import GGUFFile
from mcjax.models.piece_weights import PieceWeights
from mcjax.models.pieces import Piece, Window

NAMES = {"embedding": "token_embd.weight", "final_norm.gain": "output_norm.weight", "head": "output.weight"}
IN_BLOCK = {
    "attention_norm.gain": "attn_norm.weight",
    "attention.query": "attn_q.weight",
    "attention.key": "attn_k.weight",
    "attention.value": "attn_v.weight",
    "attention.output": "attn_output.weight",
    "feed_forward_norm.gain": "ffn_norm.weight",
    "feed_forward.gate": "ffn_gate.weight",
    "feed_forward.up": "ffn_up.weight",
    "feed_forward.down": "ffn_down.weight",
}


class GGUFWeights(PieceWeights):
    """Implements `mcjax.models.weights.PlacedSource`: dequantised to float32, then of the config's dtype.

    The file must be of exactly this config: what differs, or is in the file and in no Llama of ours (biases, frequency
    factors), is a `ConfigError` that names the field of `model`, or the tensor.
    """

    in_windows = False

    def __init__(self, file: GGUFFile, config: ModelShape):
        super().__init__(config.dtype)
        self._file = file
        check(file, config)

    def read(self, piece: Piece, window: Window) -> list[NDArray[np.float32]]:
        return [self._piece(piece.name, piece.shape)[window]]

    def origin(self, piece: Piece) -> tuple[str, object, str]:
        return KEY, self._file.path, f"its tensor {tensor_name(piece.name)}"

    def _piece(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        inside = tensor_name(name)
        rows = self._file.tensor(inside)
        if rows.size != np.prod(shape):
            problem = f"its tensor {inside} is {list(rows.shape)}, and {name} must be {list(shape)}"
            raise ConfigError(KEY, self._file.path, problem)
        return self._arranged(name.rpartition(".")[2], rows, shape)

    def _arranged(self, kind: str, rows: NDArray[np.float32], shape: tuple[int, ...]) -> NDArray[np.float32]:
        """`[out, in]` of the file as the logical shape."""
        if kind in ("query", "key"):
            inputs, heads, head_dim = shape
            # GGUF turns neighbours (2i, 2i + 1) where we turn (i, i + D/2), so its rows of a head are interleaved.
            pairs = rows.reshape(heads, head_dim // 2, 2, inputs)
            return pairs.swapaxes(1, 2).reshape(heads, head_dim, inputs).transpose(2, 0, 1)
        if kind in ("embedding", "head", "gain"):
            return rows.reshape(shape)
        return rows.T.reshape(shape)  # all others sum over what the file has as columns


def tensor_name(name: str) -> str:
    """What the file calls the parameter `name`."""
    if name in NAMES:
        return NAMES[name]
    _, layer, inside = name.split(".", 2)
    return f"blk.{layer}.{IN_BLOCK[inside]}"


def check(file: GGUFFile, config: ModelShape) -> None:
    """Raises `ConfigError` where the file's hyper-parameters, or its set of tensors, are not those of `config`."""
    architecture = file.value("general.architecture", str)
    if architecture != "llama":
        raise ConfigError(KEY, file.path, f"holds a model of the architecture {architecture!r}", ("llama",))
    scaling = file.value("llama.rope.scaling.type", str, "none")
    if scaling != "none":
        raise ConfigError(KEY, file.path, f"scales its rotary positions ({scaling}), which is not supported")
    heads = file.value("llama.attention.head_count", int)
    width = file.value("llama.embedding_length", int)
    said: dict[str, Any] = {
        "layers": file.value("llama.block_count", int),
        "d_model": width,
        "heads": heads,
        "kv_heads": file.value("llama.attention.head_count_kv", int, heads),
        "head_dim": file.value("llama.rope.dimension_count", int, width // max(heads, 1)),
        "d_ff": file.value("llama.feed_forward_length", int),
        "vocab": len(file.texts("tokenizer.ggml.tokens")),
        "tied_embeddings": NAMES["head"] not in file.tensor_names,
        "rope_theta": file.value("llama.rope.freq_base", float, 10_000.0),
        "norm_eps": file.value("llama.attention.layer_norm_rms_epsilon", float),
    }
    for field, value in said.items():
        ours = getattr(config, field)
        same = np.float32(ours) == np.float32(value) if isinstance(value, float) else ours == value
        if not same:
            shown = f"{value:g}" if isinstance(value, float) else value
            raise ConfigError(f"model.{field}", ours, f"the checkpoint {file.path.name} has {shown}")
    wanted = {tensor_name(name) for name in parameter_names(config)}
    for name in file.tensor_names:
        if name not in wanted:
            raise ConfigError(KEY, file.path, f"holds the tensor {name}, which this architecture has no use for")


def parameter_names(config: ModelShape) -> list[str]:
    """Of all pieces."""
    blocks = [f"blocks.{layer}.{inside}" for layer in range(config.layers) for inside in IN_BLOCK]
    return ["embedding", *blocks, "final_norm.gain", *([] if config.tied_embeddings else ["head"])]
