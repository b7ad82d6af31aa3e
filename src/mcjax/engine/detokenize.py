"""From tokens to text as they come: never half a character, and never the beginning of what may become a stop string.

Cost a token does not grow with the output: what is looked at again is at most a character, and text shorter than the
longest stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from mcjax.types import Tokenizer


class TextStream:
    """The text of one output. What `push` and `finish` give, joined, is the whole text up to a stop string.

    However the text is cut into tokens, it stops at the first stop string to be complete: of several that end with the
    same character, at the longest. Bytes that are no UTF-8 become U+FFFD, as `tokenizer.decode` has it.

    Args:
        tokenizer: whose tokens they are.
        stop_strings: none of them empty (`ValueError`).
        min_tokens: a stop string that is complete before so many tokens is text like any other.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = (), min_tokens: int = 0):
        if not all(stop_strings):
            raise ValueError("an empty stop string would stop before the first character")
        self.stop: str | None = None
        """The stop string that was found."""
        self.stopped_after: int | None = None
        """Of how many pushed tokens the last one completed it. Tokens after that are not looked at."""
        self._tokenizer = tokenizer
        self._stops = tuple(stop_strings)
        self._min_tokens = min_tokens
        self._longest = max(map(len, self._stops), default=0)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._pushed = 0

    def push(self, tokens: Iterable[int]) -> str:
        """The text that is sure now: `tokens` are the next of the output."""
        return "".join(self._next(token) for token in tokens)

    def finish(self) -> str:
        """What was held back: no more tokens come. A character that is still incomplete becomes U+FFFD."""
        if self.stop is not None:
            return ""
        text = self._take(self._utf8.decode(b"", final=True))
        held, self._held = self._held, ""
        return text + held

    def _next(self, token: int) -> str:
        if self.stop is not None:
            return ""
        self._pushed += 1
        return self._take(self._utf8.decode(self._tokenizer.token_bytes(int(token))))

    def _take(self, text: str) -> str:
        """What of the held text and `text` can be let go."""
        if not text:
            return ""
        looked_at = len(self._held)
        text, self._held = self._held + text, ""
        if self._pushed >= self._min_tokens:
            starts = ((text.find(stop, max(0, looked_at - len(stop) + 1)), stop) for stop in self._stops)
            found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
            if found:
                _, start, self.stop = min(found)
                self.stopped_after = self._pushed
                return text[:start]
        for size in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                self._held = text[-size:]
                return text[:-size]
        return text
