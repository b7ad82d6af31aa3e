"""A sequence in an instance's step loop: its step item, how far it shall go, and who is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mcjax.engine.base import StepItem
from mcjax.types import Logprobs, Request, Tokens

STOP_STRING_STEPS = 8
"""Most steps at once of a sequence that a stop string may end: the text is looked at in between."""


def _ignore_chunk(start: int, end: int, start_ns: int) -> None:
    pass


OnTokens = Callable[[int, Tokens | None, NDArray[np.int64], Logprobs | None], bool]
"""Hears of output tokens, `(first, tokens, ends_ns, logprobs)`; True if the output ends with them (a stop string)."""


def _ignore_tokens(
    first: int, tokens: Tokens | None, ends_ns: NDArray[np.int64], logprobs: Logprobs | None = None
) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class End:
    """How a sequence's time in a loop ended: its last token here (None where ids do not exist; a prompt's last token is
    the first of the output), when, and why the whole output ended with it (empty: it goes on). `preempted`: it had to
    make room. `logprobs` are those of a prompt's last token."""

    token: int | None
    end_ns: int
    finish_reason: str = ""
    preempted: bool = False
    logprobs: Logprobs | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's part in a loop. A prompt runs to `end`, a position; a decode until `limit` output tokens exist.

    `done` resolves when the sequence has come to its end in this loop. `on_chunk(start, end, start_ns)` and `on_tokens`
    tell of progress.
    """

    request: Request
    item: StepItem
    done: asyncio.Future[End]
    end: int = 0
    limit: int = 0
    order: int = 0
    """Grows with the time at which a prompt's job came to the instance: prompts wait in this order."""
    since: tuple[int, int, int] = (0, 0, 0)
    """Grows with the time at which an output first came to decode: who came last makes room first."""
    on_chunk: Callable[[int, int, int], None] = field(default=_ignore_chunk)
    on_tokens: OnTokens = field(default=_ignore_tokens)
    streams: bool = True
    """Somebody wants each token as it comes; else those without ids may be told of together."""
    stops_by_text: bool = False
    """A stop string may end it, which only its owner sees."""
    unsent: list[NDArray[np.int64]] = field(default_factory=list[NDArray[np.int64]])
    """Ends of decode steps that nobody was told of yet."""
    running: bool = False
    left: asyncio.Future[None] | None = None
    left_ns: int = 0

    def send(self) -> None:
        """Tell of the tokens that were held back."""
        if self.unsent:
            ends_ns = self.unsent[0] if len(self.unsent) == 1 else np.concatenate(self.unsent)
            self.unsent = []
            self.on_tokens(self.item.generated - len(ends_ns), None, ends_ns, None)
