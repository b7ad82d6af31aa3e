"""A GGUF file small enough to write in a test: a Llama with the built-in weights, and a byte-level BPE with a template.

Rows of queries and keys are interleaved here as llama.cpp's converter does it, written anew from its description.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from mcjax.cost.model_shape import ModelShape
from mcjax.cost.parameters import parameters
from mcjax.models.builtin import SeededWeights
from mcjax.models.pieces import pieces

CONTROLS = ("<|end|>", "<|start|>", "<unk>")
WORDS = ("he", "ll", "hell", "o", "Ġw")
MERGES = ("h e", "l l", "he ll", "Ġ w")
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def letters() -> list[str]:
    """The 256 letters of bytes, from GPT-2's description: what prints in Latin-1 is itself, the rest follows U+0100."""
    printable = [byte for byte in range(256) if 33 <= byte <= 126 or (161 <= byte <= 255 and byte != 173)]
    rest = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(rest)) for byte in range(256)]


def vocabulary() -> list[str]:
    return [*CONTROLS, *dict.fromkeys([*letters(), *WORDS])]


SHAPE = ModelShape(
    "small", layers=2, d_model=24, heads=4, kv_heads=2, head_dim=6, d_ff=20, vocab=len(vocabulary()),
    tied_embeddings=True, dtype_bytes=4, kv_dtype_bytes=4, max_context_tokens=64, rope_theta=5000.0, norm_eps=2e-5,
)  # fmt: skip


def weights(shape: ModelShape) -> dict[str, np.ndarray]:
    """Every piece by our names, in float32; gains unlike one another."""
    source = SeededWeights(shape, 7)
    return {
        piece.name: source.numbers(replace(piece, fan_in=3, init="uniform")).astype(np.float32)
        for name, parameter in parameters(shape).items()
        for piece in pieces(name, parameter)
    }


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """`[H * D, E]` with row i and row i + D/2 of each head brought together."""
    per_head = np.split(rows, heads)
    return np.concatenate([row for head in per_head for pair in zip(*np.split(head, 2)) for row in [np.stack(pair)]])


def write(
    path: Path, shape: ModelShape = SHAPE, metadata: dict[str, Any] | None = None, leave_out: str = "", extra: str = ""
) -> Path:
    """Write `shape` as GGUF; `metadata` overrides what it says of itself, None leaves a key out."""
    tokens = vocabulary()
    said = {
        "llama.block_count": shape.layers,
        "llama.context_length": shape.max_context_tokens,
        "llama.embedding_length": shape.d_model,
        "llama.feed_forward_length": shape.d_ff,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.kv_heads,
        "llama.rope.dimension_count": shape.head_dim,
        "llama.rope.freq_base": shape.rope_theta,
        "llama.attention.layer_norm_rms_epsilon": shape.norm_eps,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in CONTROLS else 1 for token in tokens],
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    } | (metadata or {})
    writer = gguf.GGUFWriter(path, said.pop("general.architecture", "llama"))
    for key, value in said.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    names = {"embedding": "token_embd", "final_norm.gain": "output_norm", "head": "output"}
    parts = {
        "attention_norm.gain": "attn_norm", "attention.query": "attn_q", "attention.key": "attn_k",
        "attention.value": "attn_v", "attention.output": "attn_output", "feed_forward_norm.gain": "ffn_norm",
        "feed_forward.gate": "ffn_gate", "feed_forward.up": "ffn_up", "feed_forward.down": "ffn_down",
    }  # fmt: skip
    for name, weight in weights(shape).items():
        if name in names:
            inside, rows = names[name], weight
        else:
            _, layer, part = name.split(".", 2)
            inside, rows = f"blk.{layer}.{parts[part]}", weight
            if part == "attention.output":
                rows = weight.reshape(-1, shape.d_model).T
            elif weight.ndim > 1:
                rows = weight.reshape(weight.shape[0], -1).T
            if part in ("attention.query", "attention.key"):
                rows = interleaved(rows, weight.shape[1])
        if inside != leave_out:
            writer.add_tensor(f"{inside}.weight", np.ascontiguousarray(rows))
    if extra:
        writer.add_tensor(extra, np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
