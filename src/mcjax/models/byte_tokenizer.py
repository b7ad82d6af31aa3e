"""Bytes as tokens: no vocabulary file, any text, exact round trip. Free of jax."""

from __future__ import annotations

from collections.abc import Sequence


class ByteTokenizer:
    """Ids 0-255 are the bytes of the text in UTF-8; three special ids follow. Implements `mcjax.types.Tokenizer`."""

    begin = 256
    end = 257
    padding = 258
    vocab_size = 259

    def encode(self, text: str) -> list[int]:
        """The bytes of `text`; special tokens are never added."""
        return list(text.encode("utf-8"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the byte tokens; special ids are left out, and bytes that are no UTF-8 become U+FFFD.

        Raises `ValueError` for an id outside the vocabulary.
        """
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token {token} is outside the vocabulary of {self.vocab_size}")
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")
