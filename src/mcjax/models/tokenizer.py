"""The tokenizer of a model: that of its checkpoint, or bytes. Free of jax."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from mcjax.cost.model_shape import ModelShape
from mcjax.errors import ConfigError
from mcjax.models.byte_tokenizer import ByteTokenizer
from mcjax.models.checkpoint import locate
from mcjax.types import Tokenizer

BYTES = "mcjax.models.byte_tokenizer.ByteTokenizer"


def tokenizer_for(shape: ModelShape) -> Tokenizer:
    """The tokenizer with which the model of `shape` is to be spoken to."""
    return from_checkpoint(shape.checkpoint, shape.vocab)


def from_checkpoint(checkpoint: str, vocab: int) -> Tokenizer:
    """The tokenizer in a checkpoint; bytes, if there is none. Raises `ConfigError` for one of more than `vocab` ids."""
    path = locate(checkpoint) if checkpoint else None
    tokenizer = ByteTokenizer() if path is None or speaks_bytes(path) else _at(path, vocab)
    if tokenizer.vocab_size > vocab:
        where = f" of {checkpoint}" if checkpoint else ""
        raise ConfigError("model.vocab", vocab, f"the tokenizer{where} has {tokenizer.vocab_size} tokens")
    return tokenizer


def speaks_bytes(path: Path) -> bool:
    """Whether a model directory says that its tokens are bytes, which no tokenizer of transformers has."""
    try:
        said = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(said, dict) and cast("dict[str, object]", said).get("tokenizer_class") == BYTES


def _at(path: Path, vocab: int) -> Tokenizer:
    # Here, so that bytes need none of the libraries.
    if path.is_dir():
        from mcjax.models.directory_tokenizer import DirectoryTokenizer

        return DirectoryTokenizer(path, vocab)
    from mcjax.models.bpe_tokenizer import BPETokenizer
    from mcjax.models.gguf_file import GGUFFile

    return BPETokenizer(GGUFFile(path))
