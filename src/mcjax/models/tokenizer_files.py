"""The files that make a directory's tokenizer: copied, or made of what is in a GGUF file, or of bytes. Free of jax."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mcjax.models.bpe_tokenizer import CONTROL, BPETokenizer
from mcjax.models.byte_tokenizer import ByteTokenizer
from mcjax.models.checkpoint import locate
from mcjax.models.checkpoint_tokenizer import byte_of_letter
from mcjax.models.gguf_file import GGUFFile
from mcjax.models.tokenizer import speaks_bytes

COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "generation_config.json", "tokenizer.model", "vocab.json", "merges.txt",
)  # fmt: skip
MERGES = "tokenizer.ggml.merges"
ADDED = 4
"""The type of a token that was added as text, in `tokenizer.ggml.token_type`."""
BYTES_TEMPLATE = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""`ByteTokenizer.apply_chat_template`."""


def write_tokenizer(checkpoint: str, folder: Path) -> dict[str, Any]:
    """Bring the tokenizer of a checkpoint ("": bytes) to `folder`, as transformers and this package read it.

    Returns the token ids that `config.json` names. Raises `ConfigError` for a GGUF file with a tokenizer that is not
    read here.
    """
    path = locate(checkpoint) if checkpoint else None
    if path is None or speaks_bytes(path):
        return _bytes(folder)
    if path.is_file():
        return _from_gguf(GGUFFile(path), folder)
    for name in COPIED:
        if (path / name).is_file():
            shutil.copyfile(path / name, folder / name)
    config = path / "config.json"
    said: dict[str, Any] = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    return {name: said[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in said}


def _from_gguf(file: GGUFFile, folder: Path) -> dict[str, Any]:
    BPETokenizer(file)  # refuses what would be read wrongly
    texts, types = file.texts("tokenizer.ggml.tokens"), file.wholes("tokenizer.ggml.token_type")
    merges = [(first, second) for first, _, second in (merge.partition(" ") for merge in file.texts(MERGES))]
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(texts)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    named = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}
    named["pad_token"] = "padding_token_id"
    ids = {
        name: file.value(f"tokenizer.ggml.{key}", int)
        for name, key in named.items()
        if f"tokenizer.ggml.{key}" in file.metadata
    }
    special = {name: texts[index] for name, index in ids.items() if index < len(texts)}
    added = [(text, kind == CONTROL) for text, kind in zip(texts, types, strict=True) if kind in (CONTROL, ADDED)]
    template = file.value("tokenizer.chat_template", str, "")
    _save(folder, tokenizer, added, special, template)
    return {f"{name}_id": ids[name] for name in ("bos_token", "eos_token", "pad_token") if name in ids}


def _bytes(folder: Path) -> dict[str, Any]:
    controls = {"<|begin|>": ByteTokenizer.begin, "<|end|>": ByteTokenizer.end, "<|padding|>": ByteTokenizer.padding}
    tokenizer = Tokenizer(models.BPE(vocab=byte_of_letter() | controls, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    special: dict[str, str] = dict(zip(("bos_token", "eos_token", "pad_token"), controls, strict=True))
    _save(folder, tokenizer, [(text, True) for text in controls], special, BYTES_TEMPLATE)
    return {"bos_token_id": ByteTokenizer.begin, "eos_token_id": ByteTokenizer.end}


def _save(
    folder: Path, tokenizer: Tokenizer, added: Sequence[tuple[str, bool]], special: Mapping[str, str], template: str
) -> None:
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text, is_ in added if is_])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text, is_special in added if not is_special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
