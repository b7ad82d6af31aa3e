"""Byte-level BPE of a GGUF file, as `tokenizers` computes it. Free of jax."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers

from mcjax.errors import ConfigError
from mcjax.models.chat_template import ChatTemplate
from mcjax.models.checkpoint import KEY
from mcjax.models.checkpoint_tokenizer import NO_TEMPLATE, CheckpointTokenizer, Vocabulary, bytes_of_letters
from mcjax.models.gguf_file import GGUFFile

CONTROL = 3
"""The type of a control token in `tokenizer.ggml.token_type`."""
SPLITS = ("smollm",)
"""What `tokenizer.ggml.pre` may say of how text is cut before merging."""


class BPETokenizer(CheckpointTokenizer):
    """The tokenizer in a GGUF file. Raises `ConfigError` for a file whose tokenizer is of another kind."""

    def __init__(self, file: GGUFFile):
        kind, split = file.value("tokenizer.ggml.model", str), file.value("tokenizer.ggml.pre", str, "default")
        if kind != "gpt2" or split not in SPLITS:
            problem = f"has a tokenizer of kind {kind!r}, pre-tokenizer {split!r}"
            raise ConfigError(KEY, file.path, problem, [f"gpt2, {name}" for name in SPLITS])
        texts = file.texts("tokenizer.ggml.tokens")
        types = file.wholes("tokenizer.ggml.token_type")
        pairs = [merge.partition(" ") for merge in file.texts("tokenizer.ggml.merges")]
        merges = [(first, second) for first, _, second in pairs]
        if len(types) != len(texts):
            raise file.damaged("its tokenizer has another number of tokens than of token types")
        controls = {text: index for index, text in enumerate(texts) if types[index] == CONTROL}
        ids = frozenset(controls.values())
        try:
            bpe = models.BPE(vocab={text: index for index, text in enumerate(texts) if index not in ids}, merges=merges)
            tokenizer = Tokenizer(bpe)
        except Exception as problem:  # the library raises nothing more exact
            raise file.damaged(f"merges: {problem}") from None
        digits = pre_tokenizers.Digits(individual_digits=True)
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
        special = {name: _control(name, file, ids) for name in ("bos", "eos")}
        source = file.value("tokenizer.chat_template", str, NO_TEMPLATE)
        template = ChatTemplate(source, controls, {f"{name}_token": texts[index] for name, index in special.items()})
        super().__init__(
            Vocabulary(texts, controls, bytes_of_letters()),
            lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
            template,
            (special["eos"],),
        )


def _control(name: str, file: GGUFFile, controls: frozenset[int]) -> int:
    index = file.value(f"tokenizer.ggml.{name}_token_id", int)
    if index not in controls:
        raise file.damaged(f"its {name} token {index} is no control token")
    return index
