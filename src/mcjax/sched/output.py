"""What a client has of an output of its request. It is never taken back: what is computed again is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mcjax.types import Logprobs, Request, Sampling, Tokens

Listener = Callable[[Tokens | None, NDArray[np.int64]], None]
"""Hears of output 0 as it comes: `(tokens, ends_ns)`, tokens None where ids do not exist."""

TextListener = Callable[[int, str], None]
"""Hears of the text of every output as it comes: `(output, text)`."""

STOP, LENGTH = "stop", "length"
"""Why an output ended: a stop token or a stop string (or a script's end), or `max_tokens`."""


class TextStream(Protocol):
    """Makes text of tokens as they come, up to a stop string."""

    stop: str | None
    """The stop string that was found."""

    def push(self, tokens: Iterable[int]) -> str:
        """The text that is sure now: `tokens` are the next of the output."""
        ...

    def finish(self) -> str:
        """What was held back: no more tokens come."""
        ...


def sampling_of(sampling: Sampling, output: int) -> Sampling:
    """What output `output` of a request with `n > 1` is sampled with: the same, but for a seed of its own.

    Output 0 has the request's seed; that of output i is a 64-bit mix (splitmix64's) of it and i.
    """
    if output == 0:
        return sampling
    word = (sampling.seed + output * 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return replace(sampling, seed=word ^ (word >> 31))


_WORD = (1 << 64) - 1


@dataclass(slots=True, eq=False)
class Output:
    """One output of a job. `produced` tokens have been given to the client."""

    index: int
    sampling: Sampling
    max_tokens: int
    tokens: list[int] | None
    """None in worlds without token ids."""
    produced: int = 0
    finish_reason: str = ""
    """Why it ended; empty while it goes on."""
    ends_ns: list[NDArray[np.int64]] = field(default_factory=list[NDArray[np.int64]])
    """When each token was there, in pieces."""
    logprobs: list[Logprobs] = field(default_factory=list[Logprobs])
    """Of its tokens, in pieces, where they were asked for."""
    text: TextStream | None = None
    listener: Listener | None = None
    text_listener: TextListener | None = None
    since: tuple[int, int, int] | None = None
    """When it first began to decode anywhere; then, to tell outputs apart, its request and its index."""
    _known_logprobs: int = 0

    @classmethod
    def of(cls, request: Request, index: int, keeps_tokens: bool) -> Output:
        """Output `index` of a request, of which there is nothing yet."""
        return cls(index, sampling_of(request.sampling, index), request.max_tokens, [] if keeps_tokens else None)

    @property
    def streams(self) -> bool:
        """Whether somebody wants each token as it comes."""
        return self.listener is not None or self.text is not None

    def emit(
        self, first: int, tokens: Tokens | None, ends_ns: NDArray[np.int64], logprobs: Logprobs | None = None
    ) -> bool:
        """Tokens number `first`, `first + 1`, ... exist; what the client already has (a replay) is left out.

        True once the output has ended: with a stop string. What comes after that is left out too.
        """
        skip = self.produced - first
        if skip < len(ends_ns) and not self.finish_reason:
            if skip > 0:
                ends_ns = ends_ns[skip:]
                tokens = None if tokens is None else tokens[skip:]
            text = ""
            if self.text is not None and tokens is not None:
                count, text = self._read(self.text, tokens)
                tokens, ends_ns = tokens[:count], ends_ns[:count]
            self.ends_ns.append(ends_ns)
            self.produced += len(ends_ns)
            if self.tokens is not None and tokens is not None:
                self.tokens.extend(tokens.tolist())
            if self.listener is not None:
                self.listener(tokens, ends_ns)
            self._tell(text)
        if logprobs is not None:
            self._keep(first, logprobs)
        return self.finish_reason != ""

    def end(self, reason: str) -> None:
        """No more tokens come."""
        if not self.finish_reason:
            self.finish_reason = reason
            if self.text is not None:
                self._tell(self.text.finish())

    def _read(self, stream: TextStream, tokens: Tokens) -> tuple[int, str]:
        """How many of the tokens belong to the output, and their text."""
        text = ""
        for count, token in enumerate(tokens.tolist(), 1):
            text += stream.push((token,))
            if stream.stop is not None:
                self.finish_reason = STOP
                return count, text
        return len(tokens), text

    def _tell(self, text: str) -> None:
        if text and self.text_listener is not None:
            self.text_listener(self.index, text)

    def _keep(self, first: int, logprobs: Logprobs) -> None:
        """Tokens told of step by step come without log probabilities; those follow with the plan's answer."""
        skip, end = max(0, self._known_logprobs - first), max(0, self.produced - first)
        chosen = logprobs.chosen[skip:end]
        if len(chosen):
            self.logprobs.append(Logprobs(chosen, logprobs.top_tokens[skip:end], logprobs.top[skip:end]))
            self._known_logprobs += len(chosen)


def joined(pieces: list[Logprobs]) -> Logprobs | None:
    """The log probabilities of a whole output; None if there are none."""
    if not pieces:
        return None
    columns = [[getattr(piece, name) for piece in pieces] for name in ("chosen", "top_tokens", "top")]
    return Logprobs(*map(np.concatenate, columns))
