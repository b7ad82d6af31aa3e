"""Byte-level BPE of a GGUF file, as `tokenizers` computes it. Free of jax."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, models, pre_tokenizers

from mcjax.errors import ConfigError
from mcjax.models.chat_template import ChatTemplate, Control
from mcjax.models.checkpoint import KEY
from mcjax.models.gguf_file import GGUFFile
from mcjax.types import ChatMessage

CONTROL = 3
"""The type of a control token in `tokenizer.ggml.token_type`."""
SPLITS = ("smollm",)
"""What `tokenizer.ggml.pre` may say of how text is cut before merging."""


class BPETokenizer:
    """Implements `mcjax.types.Tokenizer`. Raises `ConfigError` for a file whose tokenizer is of another kind.

    Control tokens are no part of the vocabulary that `encode` works with: no text becomes one. A byte for which there
    is no token (some control characters, unassigned planes) is left out, as the model's authors have it. An answer that
    is given as ids loses the end token that closes it, since templates close messages themselves.
    """

    def __init__(self, file: GGUFFile):
        kind, split = file.value("tokenizer.ggml.model", str), file.value("tokenizer.ggml.pre", str, "default")
        if kind != "gpt2" or split not in SPLITS:
            problem = f"has a tokenizer of kind {kind!r}, pre-tokenizer {split!r}"
            raise ConfigError(KEY, file.path, problem, [f"gpt2, {name}" for name in SPLITS])
        self._texts = file.texts("tokenizer.ggml.tokens")
        self.vocab_size = len(self._texts)
        types = file.wholes("tokenizer.ggml.token_type")
        pairs = [merge.partition(" ") for merge in file.texts("tokenizer.ggml.merges")]
        merges = [(first, second) for first, _, second in pairs]
        if len(types) != self.vocab_size:
            raise file.damaged("its tokenizer has another number of tokens than of token types")
        self._control_ids = {text: index for index, text in enumerate(self._texts) if types[index] == CONTROL}
        self._controls = frozenset(self._control_ids.values())
        vocabulary = {text: index for index, text in enumerate(self._texts) if index not in self._controls}
        self._bytes = byte_of_letter()
        try:
            self._tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        except Exception as problem:  # the library raises nothing more exact
            raise file.damaged(f"merges: {problem}") from None
        digits, letters = (
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        )
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
        self.end_tokens = (self._control("eos", file),)
        named = {f"{name}_token": self._texts[self._control(name, file)] for name in ("bos", "eos")}
        source = file.value("tokenizer.chat_template", str, NO_TEMPLATE)
        self._template = ChatTemplate(source, self._control_ids, named)

    def encode(self, text: str) -> list[int]:
        """Ids of the text, of which none is a control token."""
        return self._tokenizer.encode(text.encode("utf-8", errors="replace").decode(), add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without control tokens; bytes that are no UTF-8 become U+FFFD. `ValueError`: outside the vocabulary."""
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """What the token adds to the text; nothing, if it is a control token."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token {token} is outside the vocabulary of {self.vocab_size}")
        if token in self._controls:
            return b""
        try:
            return bytes(self._bytes[letter] for letter in self._texts[token])
        except KeyError:  # a token that was added as text
            return self._texts[token].encode()

    def apply_chat_template(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> list[int]:
        """The conversation through the file's own template. Raises `ChatTemplateError` for what it does not take."""
        ids: list[int] = []
        for piece in self._template.render([self._open(message) for message in messages], add_generation_prompt):
            if isinstance(piece, str):
                ids += self.encode(piece)
            elif isinstance(piece, Control):
                ids.append(self._control_ids[piece.text])
            else:
                ids += piece
        return ids

    def _open(self, message: ChatMessage) -> ChatMessage:
        content = message.get("content")
        if isinstance(content, str) or not content or content[-1] not in self.end_tokens:
            return message
        return {**message, "content": content[:-1]}

    def _control(self, name: str, file: GGUFFile) -> int:
        index = file.value(f"tokenizer.ggml.{name}_token_id", int)
        if index not in self._controls:
            raise file.damaged(f"its {name} token {index} is no control token")
        return index


NO_TEMPLATE = "{{ raise_exception('the model has no chat template') }}"


def byte_of_letter() -> dict[str, int]:
    """The letters in which byte-level BPE writes bytes: Latin-1 where it prints, others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}
