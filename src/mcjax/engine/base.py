"""The compute seam: step plans go in, progress comes out. Implemented once a world."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mcjax.kvpool.base import BlockStore
from mcjax.types import Logprobs, Sampling, Tokens

MOST_LOGPROBS = 8
"""Alternatives a token whose log probabilities may be asked for. Programs have one shape: so there is a limit."""
MOST_STOPS = 8
"""Stop tokens that `min_tokens` may hold back, likewise."""


class Kind(enum.Enum):
    """What a step item computes."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an executor can hold. One page holds one block of `page_tokens` tokens."""

    pages: int
    page_tokens: int
    page_bytes: int
    max_batch: int
    chunk_tokens: int
    max_context_tokens: int


@dataclass(slots=True, eq=False)
class StepItem:
    """One sequence's share of a step. The loop owns it and moves `start` on; executors only read it.

    The step feeds tokens `start .. start + q_len`, writes their KV into `pages` (position p lies in page
    `p // page_tokens` of them), and attends to everything before. If `samples`, the logits of the last position give
    the next token; with macro-steps that token is fed in turn. `tokens` holds what is known of them
    (`[q_len + forced]`; None where ids do not exist): step k feeds `tokens[k : k + q_len]`, or the token last produced
    once they run out.
    """

    request_id: int
    kind: Kind
    start: int
    q_len: int
    pages: list[int]
    sampling: Sampling
    tokens: Tokens | None = None
    samples: bool = True
    generated: int = 0
    """Output tokens before this step; a simulated executor finds the end of the output by it."""
    forced: int = 0
    """How many of the next tokens are already known (a replay after a loss): they are fed, not sampled."""
    adapter: str = ""
    prompt: Tokens | None = None
    """Where the sampler wants to know what there has been (`Sampling.penalises`): the whole prompt ..."""
    output: list[int] = field(default_factory=list[int])
    """... and the output so far, which whoever owns it goes on with."""


@dataclass(slots=True)
class StepPlan:
    """A ragged batch. Decode items all have `q_len == 1`."""

    items: list[StepItem] = field(default_factory=list[StepItem])


@dataclass(slots=True)
class Progress:
    """What happened: `ends_ns[k]` is when step k ended (`[steps]` int64, run time).

    `tokens[i]` are the tokens item i produced (`[0..steps]`; None where only counts exist: then one a step if it
    samples). `finished` holds the indices of items whose output ended (stop token, or the script's end), in order.
    `failed` says of items that came to nothing (no finite logit) why, in words; the others are as if it had not been
    there. `logprobs[i]` are those of `tokens[i]`, where they were asked for.
    """

    steps: int
    start_ns: int
    ends_ns: NDArray[np.int64]
    tokens: list[Tokens | None]
    finished: tuple[int, ...] = ()
    failed: dict[int, str] = field(default_factory=dict[int, str])
    logprobs: dict[int, Logprobs] = field(default_factory=dict[int, Logprobs])


OnStep = Callable[[int, Sequence[int | None], int], None]
"""Hears of a step while its plan goes on: `(step, tokens, end_ns)`, a token (or None) for each item."""


class Executor(Protocol):
    """Runs step plans on one device or mesh (or pretends to), one plan at a time."""

    name: str

    def capacity(self) -> Capacity: ...

    async def run(self, plan: StepPlan, max_steps: int, on_step: OnStep | None = None) -> Progress:
        """Run up to `max_steps` equal steps; ends early when an item's output ends or fails, or on `interrupt`.

        `on_step` is told of steps as they end, before the answer, where the executor learns of them one by one; the
        answer tells of all.
        """
        ...

    def interrupt(self) -> None:
        """Stop at the next step boundary. Does nothing when idle."""
        ...

    def step_ends_ns(self) -> NDArray[np.int64]:
        """When steps of the plan under way end, as far as that is known without asking the device: a simulated executor
        knows all, one that waits for its device none until the plan is done. Those before now have ended."""
        ...

    def busy_ns(self) -> int:
        """Time spent computing so far."""
        ...


class Watcher(Protocol):
    """Hears what becomes of an instance that runs elsewhere."""

    def died(self) -> None:
        """Its process has gone, and its node's memory with it. Told once."""
        ...

    def replaced(self, by: str) -> None:
        """After `died`: another one is ready to take its place, under the name `by`."""
        ...


def _never(watcher: Watcher) -> None:
    """An instance of this process dies with it."""


@dataclass(slots=True)
class InstanceParts:
    """One instance's mechanisms: compute, and the device memory that its pages lie in."""

    executor: Executor
    pages: BlockStore
    watch: Callable[[Watcher], None] = _never
    """Takes who is to hear what becomes of the instance."""
