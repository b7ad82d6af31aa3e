"""A sequence in an instance's step loop: its step item, how far it shall go, and who is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mcjax.engine.base import StepItem
from mcjax.types import Request, Tokens


def _ignore_chunk(start: int, end: int, start_ns: int) -> None:
    pass


def _ignore_tokens(first: int, tokens: Tokens | None, ends_ns: NDArray[np.int64]) -> None:
    pass


@dataclass(frozen=True, slots=True)
class End:
    """How a sequence's time in a loop ended: its last token here (None where ids do not exist; a prompt's last token is
    the first of the output), when, and whether the whole output ended with it. `preempted`: it had to make room."""

    token: int | None
    end_ns: int
    output_ended: bool
    preempted: bool = False


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's part in a loop. A prompt runs to `end`, a position; a decode until `limit` output tokens exist.

    `done` resolves when the sequence has come to its end in this loop. `on_chunk(start, end, start_ns)` and
    `on_tokens(first, tokens, ends_ns)` tell of progress.
    """

    request: Request
    item: StepItem
    done: asyncio.Future[End]
    end: int = 0
    limit: int = 0
    order: int = 0
    """Grows with the time at which a prompt's job came to the instance, or at which it came to decode here: prompts
    wait in this order, and of the decodes who came last makes room first."""
    on_chunk: Callable[[int, int, int], None] = field(default=_ignore_chunk)
    on_tokens: Callable[[int, Tokens | None, NDArray[np.int64]], None] = field(default=_ignore_tokens)
    streams: bool = True
    """Somebody wants each token as it comes; else those without ids may be told of together."""
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
            self.on_tokens(self.item.generated - len(ends_ns), None, ends_ns)
