"""A sequence in an instance's step loop: its step item, how far it shall go, and who is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as PySequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mcjax import aio
from mcjax.engine.base import OnStep, Progress, StepItem
from mcjax.types import BlockId, Logprobs, Request, Tokens

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
    blocks: tuple[BlockId, ...] = ()
    """A prompt's full blocks, for the log."""
    order: int = 0
    """Grows with the time at which a prompt's job came to the instance: prompts wait in this order."""
    since: tuple[int, int, int] = (0, 0, 0)
    """Grows with the time at which an output first came to decode: who came last makes room first."""
    on_chunk: Callable[[int, int, int], None] = field(default=_ignore_chunk)
    on_tokens: OnTokens = field(default=_ignore_tokens)
    streams: bool = True
    """Somebody wants each token as it comes; else those without ids may be told of together."""
    most_steps: int = 1 << 30
    """So many steps at once: few where a stop string may end it, which only its owner sees."""
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

    def advance(self, steps: int, tokens: Tokens | None) -> None:
        """So many decode steps are done, and gave these tokens."""
        item = self.item
        item.start += steps
        item.generated += steps
        item.forced = max(0, item.forced - steps)
        if tokens is not None and item.tokens is not None:
            item.tokens = item.tokens[steps:] if item.forced else tokens[-1:]
            if item.prompt is not None:
                item.output.extend(tokens.tolist())

    def tell_part(self, progress: Progress, index: int, first: int) -> None:
        """Tell, of a macro-step, what there was before it left, and before its last step if that gave nothing."""
        seen, ends_ns, tokens = progress.steps - (index in progress.failed), progress.ends_ns, progress.tokens[index]
        if self.left is not None:
            seen = min(seen, int(ends_ns.searchsorted(self.left_ns)))
        if seen:
            told = None if tokens is None else tokens[:seen]
            self.on_tokens(first, told, ends_ns[:seen], progress.logprobs.get(index))


def teller(chosen: PySequence[Sequence], interrupt: Callable[[], None]) -> OnStep | None:
    """Tells those who want each token as it comes, before the plan is done; None if there is nobody.

    Where an output ends with a token, what else the plan gives it is for nothing, and it is interrupted.
    """
    if True not in [sequence.streams for sequence in chosen]:  # half the price of `any`, each step
        return None
    firsts = [sequence.item.generated for sequence in chosen]

    def on_step(step: int, tokens: PySequence[int | None], end_ns: int) -> None:
        ends_ns = np.array([end_ns], np.int64)
        for sequence, first, token in zip(chosen, firsts, tokens, strict=True):
            if not sequence.streams or not sequence.running or sequence.left is not None:
                continue  # nobody waits for it, or it has left, or died
            if token is None and sequence.item.tokens is not None:
                continue  # ids exist, and this step gave it none
            produced = None if token is None else np.array([token], np.int32)
            if sequence.on_tokens(first + step, produced, ends_ns, None):
                interrupt()

    return on_step


async def ended(left: asyncio.Future[None]) -> None:
    """Wait for a step to let go of a sequence, and obey a cancellation only then: its pages are about to be reused."""
    cancelled: asyncio.CancelledError | None = None
    while not left.done():
        try:
            await aio.first_of([left])
        except asyncio.CancelledError as problem:
            cancelled = problem
    if cancelled is not None:
        raise cancelled
