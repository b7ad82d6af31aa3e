"""A Hugging Face model directory small enough for a test, by safetensors' own writer: random weights by name."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from mcjax.cost.model_shape import ModelShape
from mcjax.models.hugging_face import Dialect, stored

INDEX = "model.safetensors.index.json"


def shape_of(config: dict[str, Any], path: Path | str = "", **changes: Any) -> ModelShape:
    return ModelShape.from_hugging_face(config, "small", checkpoint=str(path), **changes)


def tensors(config: dict[str, Any], dialect: Dialect | None = None, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Normal numbers under every name that a checkpoint of this config has."""
    found: dict[str, np.ndarray] = {}
    for piece, source in stored(shape_of(config), dialect or Dialect()).items():
        for name in source.tensors:
            if name not in found:
                drawn = np.random.default_rng(zlib.crc32(name.encode())).normal(size=source.shape)
                scale = source.shape[-1] ** -0.5 if len(source.shape) > 1 and piece != "embedding" else 0.5
                found[name] = (drawn * scale).astype(dtype)
    return found


def write(path: Path, config: dict[str, Any], weights: Mapping[str, np.ndarray] | None = None, files: int = 1) -> Path:
    """`config.json` and the weights, in so many files, with an index if they are several."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    found = dict(tensors(config) if weights is None else weights)
    if files == 1:
        save_file(found, path / "model.safetensors", metadata={"format": "pt"})
        return path
    places: dict[str, str] = {}
    names = sorted(found)
    for part in range(files):
        file = f"model-{part + 1:05}-of-{files:05}.safetensors"
        save_file({name: found[name] for name in names[part::files]}, path / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names[part::files], file)
    total = sum(array.nbytes for array in found.values())
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))
    return path


SPECIAL = ("<|end|>", "<|start|>", "<unk>")
"""Inside the vocabulary, as SmolLM2 and Llama 2 have them; `<|late|>` lies behind it, as Llama 3 and Qwen have it."""
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def tokenizer(kind: str = "letters") -> dict[str, Any]:
    """A `tokenizer.json`: `letters` is byte-level BPE, `pieces` has U+2581 for spaces and spells out bytes,
    and `prepended` does so as Llama 2's.
    """
    normalizer: Any = None
    if kind == "letters":
        printable = [byte for byte in range(256) if 33 <= byte <= 126 or (161 <= byte <= 255 and byte != 173)]
        rest = iter(range(256, 512))
        alphabet = [chr(byte) if byte in printable else chr(next(rest)) for byte in range(256)]
        words, merges = ["he", "ll", "hell", "Ġw"], ["h e", "l l", "he ll", "Ġ w"]
        splitter: Any = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        decoder: Any = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    else:
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)] + list("helowrd ▁,.é")
        words, merges = ["he", "ll", "hell", "▁w", "▁▁"], ["h e", "l l", "he ll", "▁ w", "▁ ▁"]
        splitter = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
        steps: list[Any] = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]
        steps += [{"type": "ByteFallback"}, {"type": "Fuse"}]
        if kind == "prepended":
            spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
            normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces]}
            splitter = None
            steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        decoder = {"type": "Sequence", "decoders": steps}
    vocab = {text: index for index, text in enumerate([*SPECIAL, *dict.fromkeys([*alphabet, *words])])}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": index, "content": text, **plain, "special": True} for index, text in enumerate(SPECIAL)]
    added.append({"id": len(vocab), "content": "<|late|>", **plain, "special": True})
    added.append({"id": len(vocab) + 1, "content": "<think>", **plain, "special": False})
    around = {"id": "<|start|>", "ids": [1], "tokens": ["<|start|>"]}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": kind != "letters", "ignore_merges": False, "vocab": vocab, "merges": merges,
    }  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": normalizer,
        "pre_tokenizer": splitter, "decoder": decoder, "model": model,
        "post_processor": {
            "type": "TemplateProcessing", "special_tokens": {"<|start|>": around},
            "single": [{"SpecialToken": {"id": "<|start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        },
    }  # fmt: skip


def write_tokenizer(path: Path, kind: str = "letters", **said: Any) -> Path:
    """The tokenizer's files, into a directory that may have others."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer(kind)))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|start|>", "clean_up_tokenization_spaces": False,
        "eos_token": {"__type": "AddedToken", "content": "<|end|>"}, "chat_template": TEMPLATE, **said,
    }  # fmt: skip
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path
