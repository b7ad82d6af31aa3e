"""What tokenizers of all checkpoints share: control tokens come from the chat template alone. Free of jax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mcjax.models.chat_template import ChatTemplate, Control
from mcjax.types import ChatMessage

NO_TEMPLATE = "{{ raise_exception('the model has no chat template') }}"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the ids of a tokenizer mean."""

    texts: Sequence[str | None]
    """By id, as its model writes them; None: no token has the id."""
    controls: dict[str, int]
    """Ids of the control tokens."""
    as_bytes: Callable[[str], bytes]
    """From such a text to what the token adds to an answer."""
    strips_left: frozenset[str] = field(default_factory=frozenset[str])
    """Control tokens that take the white space before them with them."""
    strips_right: frozenset[str] = field(default_factory=frozenset[str])
    """And behind them."""


class CheckpointTokenizer:
    """Implements `mcjax.types.Tokenizer`.

    Control tokens are no part of the vocabulary that `encode` works with: no text becomes one. A byte for which there
    is no token (some control characters, unassigned planes) is left out, as the model's authors have it. An answer that
    is given as ids loses the end token that closes it, since templates close messages themselves.

    Args:
        encoder: ids of a text, none of them a control token's.
        later: the same for text that follows a control token, where that makes a difference.
        ends: tokens with which a model ends its answer; control tokens all of them.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        encoder: Callable[[str], list[int]],
        template: ChatTemplate,
        ends: Sequence[int],
        later: Callable[[str], list[int]] | None = None,
    ):
        self.vocab_size = len(vocabulary.texts)
        self.end_tokens = tuple(ends)
        self._vocabulary = vocabulary
        self._controls = frozenset(vocabulary.controls.values())
        self._encoder, self._later = encoder, later or encoder
        self._template = template

    def encode(self, text: str) -> list[int]:
        """Ids of the text, of which none is a control token."""
        return self._encoder(_valid(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without control tokens; bytes that are no UTF-8 become U+FFFD. `ValueError`: outside the vocabulary."""
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """What the token adds to the text; nothing, if it is a control token."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token {token} is outside the vocabulary of {self.vocab_size}")
        text = self._vocabulary.texts[token]
        return b"" if text is None or token in self._controls else self._vocabulary.as_bytes(text)

    def apply_chat_template(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> list[int]:
        """The conversation through the model's own template. Raises `ChatTemplateError` for what it does not take."""
        ids: list[int] = []
        pieces = self._template.render([self._open(message) for message in messages], add_generation_prompt)
        words = self._vocabulary
        for index, piece in enumerate(pieces):
            if isinstance(piece, str):
                before, behind = (pieces[index - 1] if index else None), (*pieces, None)[index + 1]
                if isinstance(before, Control) and before.text in words.strips_right:
                    piece = piece.lstrip()
                if isinstance(behind, Control) and behind.text in words.strips_left:
                    piece = piece.rstrip()
                ids += (self._later if index else self._encoder)(_valid(piece))
            elif isinstance(piece, Control):
                ids.append(words.controls[piece.text])
            else:
                ids += piece
        return ids

    def _open(self, message: ChatMessage) -> ChatMessage:
        content = message.get("content")
        if isinstance(content, str) or not content or content[-1] not in self.end_tokens:
            return message
        return {**message, "content": content[:-1]}


def _valid(text: str) -> str:
    """Without lone surrogates, which no UTF-8 has."""
    return text.encode("utf-8", errors="replace").decode()


def byte_of_letter() -> dict[str, int]:
    """The letters in which byte-level BPE writes bytes: Latin-1 where it prints, others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}


def bytes_of_letters() -> Callable[[str], bytes]:
    """From a token of byte-level BPE to its bytes."""
    table = byte_of_letter()

    def as_bytes(text: str) -> bytes:
        try:
            return bytes(table[letter] for letter in text)
        except KeyError:  # a token that was added as text
            return text.encode()

    return as_bytes
