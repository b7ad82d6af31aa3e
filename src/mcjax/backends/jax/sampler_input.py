"""What a call of a sampler program takes beside the logits: one row a sequence, packed from its sampler parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mcjax.backends.jax.sampling import FULL_NUMBERS, FULL_WORDS
from mcjax.engine.base import MOST_LOGPROBS, MOST_STOPS, StepItem
from mcjax.types import Logprobs, Sampling

_LENGTH, _HELD, _KNOWN = 5, 6, 7
"""Words of a full row that change from step to step, beside the position."""


@dataclass(slots=True)
class Part:
    """One item of a plan, as far as its tokens go."""

    sampling: Sampling
    samples: bool
    generated: int
    """Output tokens before this plan."""
    known: list[int]
    """The tokens known to follow the ones fed in the first step."""
    output: list[int] = field(default_factory=list[int])
    logprobs: list[NDArray[np.int32]] = field(default_factory=list[NDArray[np.int32]])
    """One `[1 + 2K]` a token, as `sampling.sample_fully` tells them; empty where nobody asked."""

    @property
    def plain(self) -> bool:
        """Whether the plain sampler will do."""
        return self.sampling.plain or not self.samples

    @property
    def held(self) -> bool:
        """Whether the next token must not be a stop token."""
        return self.generated + len(self.output) < self.sampling.min_tokens

    @property
    def next_known(self) -> int:
        """The next token, if it is known, else -1."""
        return self.known[len(self.output)] if len(self.output) < len(self.known) else -1

    def take(self, token: int) -> bool:
        """Take a token (a known one stands before a sampled one); True if the output ends with it."""
        known, held = self.next_known, self.held
        chosen = token if known < 0 else known
        self.output.append(chosen)
        return self.samples and not held and chosen in self.sampling.stop_tokens

    def told(self) -> Logprobs | None:
        """The log probabilities of `output`, if they were asked for."""
        if self.sampling.logprobs is None or not self.samples:
            return None
        most = self.sampling.logprobs
        rows = np.stack(self.logprobs) if self.logprobs else np.zeros((0, 1), np.int32)
        count = rows.shape[1] // 2
        ids, top = rows[:, 1 : 1 + count], rows[:, 1 + count :].view(np.float32)
        return Logprobs(rows[:, 0].view(np.float32), ids[:, :most].copy(), top[:, :most].copy())


def check(item: StepItem) -> None:
    """Raise `ValueError` for parameters beyond what the programs hold, and for an item without its past."""
    sampling, who = item.sampling, f"request {item.request_id}"
    if sampling.logprobs is not None and sampling.logprobs > MOST_LOGPROBS:
        raise ValueError(f"{who}: logprobs={sampling.logprobs}, at most {MOST_LOGPROBS}")
    if sampling.min_tokens and len(sampling.stop_tokens) > MOST_STOPS:
        raise ValueError(f"{who}: {len(sampling.stop_tokens)} stop tokens to hold back, at most {MOST_STOPS}")
    if item.samples and sampling.penalises and (item.prompt is None or len(item.output) < item.generated):
        got = "no prompt" if item.prompt is None else f"{len(item.output)} of {item.generated} output tokens"
        raise ValueError(f"{who}: penalties need prompt and output, got {got}")


def plain_rows(items: Sequence[StepItem], batch: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """`words [B, 3]` and `temperatures [B]`, see `sampling.sample`; rows beyond the items are greedy padding."""
    words = np.zeros((batch, 3), dtype=np.int32)
    temperatures = np.zeros(batch, dtype=np.float32)
    for row, item in enumerate(items):
        words[row] = seed_words(item.sampling.seed, item.start + item.q_len)
        temperatures[row] = item.sampling.temperature
    return words, temperatures


def full_rows(
    items: Sequence[StepItem], parts: Sequence[Part], batch: int, max_context_tokens: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """`words [B, FULL_WORDS + C]` and `numbers [B, 6]`, see `sampling.sample_fully`."""
    words = np.zeros((batch, FULL_WORDS + max_context_tokens), dtype=np.int32)
    words[:, _KNOWN] = -1
    words[:, 9:FULL_WORDS] = -1
    numbers = np.tile(np.array([0, 1, 0, 1, 0, 0], dtype=np.float32), (batch, 1))
    assert numbers.shape[1] == FULL_NUMBERS
    for row, (item, part) in enumerate(zip(items, parts, strict=True)):
        asked, word = item.sampling, words[row]
        word[:3] = seed_words(asked.seed, item.start + item.q_len)
        numbers[row, 0] = asked.temperature
        if part.plain:
            continue
        numbers[row, 1:] = (
            asked.top_p,
            asked.min_p,
            asked.repetition_penalty,
            asked.presence_penalty,
            asked.frequency_penalty,
        )
        word[3] = asked.top_k
        word[_HELD], word[_KNOWN], word[8] = part.held, part.next_known, asked.logprobs is not None
        if asked.min_tokens:
            word[9 : 9 + len(asked.stop_tokens)] = asked.stop_tokens
        if asked.penalises:
            assert item.prompt is not None  # `check` said so
            past = np.concatenate([item.prompt, np.array(item.output[: item.generated], np.int32)])
            word[4], word[_LENGTH] = len(item.prompt), len(past)
            word[FULL_WORDS : FULL_WORDS + len(past)] = past
    return words, numbers


def go_on(word: NDArray[np.int32], part: Part) -> None:
    """Bring a full row to its next step."""
    if part.plain:
        return
    word[_HELD], word[_KNOWN] = part.held, part.next_known
    if part.sampling.penalises:
        word[FULL_WORDS + word[_LENGTH]] = part.output[-1]
        word[_LENGTH] += 1


def seed_words(seed: int, position: int) -> NDArray[np.int32]:
    """`[3]` int32: the high and low word of a 64-bit seed, and a position."""
    words = np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF, position], dtype=np.uint32)
    return words.view(np.int32)
