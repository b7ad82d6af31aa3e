"""Bytes as tokens: no vocabulary file, any text, exact round trip. Free of jax."""

from __future__ import annotations

from collections.abc import Sequence

from mcjax.errors import ChatTemplateError
from mcjax.types import ChatMessage


class ByteTokenizer:
    """Ids 0-255 are the bytes of the text in UTF-8; three control tokens follow. Implements `mcjax.types.Tokenizer`."""

    begin = 256
    end = 257
    padding = 258
    vocab_size = 259
    end_tokens = (end,)

    def encode(self, text: str) -> list[int]:
        """The bytes of `text`; control tokens are never added. Half a surrogate pair, which is no text, becomes `?`."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the byte tokens; control tokens are left out, and bytes that are no UTF-8 become U+FFFD.

        Raises `ValueError` for an id outside the vocabulary.
        """
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The byte, or nothing for a control token. Raises `ValueError` for an id outside the vocabulary."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token {token} is outside the vocabulary of {self.vocab_size}")
        return bytes([token]) if token < 256 else b""

    def apply_chat_template(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> list[int]:
        """A line a message, `User: ...`, closed by the end token; then `Assistant:`, after which the answer begins.

        Raises `ChatTemplateError` for a message without role or content.
        """
        ids: list[int] = []
        for message in messages:
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str) or content is None:
                raise ChatTemplateError(f"a message needs a role and a content, not {sorted(message)}")
            ids += self.encode(f"{role.capitalize()}:")
            said = self.encode(f" {content}") if isinstance(content, str) else list(content)
            ids += said[:-1] if said[-1:] == [self.end] else said
            ids += [self.end, *self.encode("\n")]
        return ids + (self.encode("Assistant:") if add_generation_prompt else [])
