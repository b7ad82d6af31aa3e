"""Byte-true compute without a model: a token's cache entry is a digest of its prefix, the next token a hash of all.

So one wrong byte anywhere in a request's cache changes what is generated, as it would with a real model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mcjax.types import Sampling, Tokens

ENTRY_BYTES = 8
VOCAB = 251

GREEDY = Sampling()


def entry(before: bytes, token: int) -> bytes:
    """The cache entry of a token, given the entry before it (empty at the start)."""
    return hashlib.blake2b(before + token.to_bytes(4, "little"), digest_size=ENTRY_BYTES).digest()


def next_token(entries: bytes, position: int, sampling: Sampling = GREEDY) -> int:
    """The token for `position`, having read every entry before it; where it is not greedy, of its seed too."""
    seed = b"" if sampling.temperature == 0 else sampling.seed.to_bytes(8, "little")
    digest = hashlib.blake2b(entries + seed + position.to_bytes(4, "little"), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def logprob(token: int, position: int) -> float:
    """What stands for the log probability of a token; it tells one position from another."""
    return -1.0 - token - position * VOCAB


def reference(prompt: Tokens, output_tokens: int, sampling: Sampling = GREEDY) -> list[int]:
    """What a request must produce, computed without pages, pools or transfers."""
    entries = bytearray()
    before = b""
    for token in prompt.tolist():
        before = entry(before, token)
        entries += before
    output = [next_token(bytes(entries), len(prompt), sampling)]
    while len(output) < output_tokens:
        before = entry(before, output[-1])
        entries += before
        output.append(next_token(bytes(entries), len(prompt) + len(output), sampling))
    return output


class PageView:
    """A sequence's entries, spread over pages of a store's buffer (`[pages, page_bytes]`)."""

    def __init__(self, buffer: NDArray[np.uint8], pages: Sequence[int], page_tokens: int):
        self._buffer = buffer
        self._pages = pages
        self._page_tokens = page_tokens

    def read(self, position: int) -> bytes:
        page, offset = divmod(position, self._page_tokens)
        start = offset * ENTRY_BYTES
        return self._buffer[self._pages[page], start : start + ENTRY_BYTES].tobytes()

    def write(self, position: int, value: bytes) -> None:
        page, offset = divmod(position, self._page_tokens)
        start = offset * ENTRY_BYTES
        self._buffer[self._pages[page], start : start + ENTRY_BYTES] = np.frombuffer(value, np.uint8)

    def read_all(self, tokens: int) -> bytes:
        """Every entry of positions `0 .. tokens`."""
        full = -(-tokens // self._page_tokens)
        return self._buffer[list(self._pages[:full])].tobytes()[: tokens * ENTRY_BYTES]
