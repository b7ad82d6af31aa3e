"""Decodes keep prompts waiting, within a bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mcjax.errors import ConfigError
from mcjax.sched.base import Batch


@dataclass
class DecodeFirst:
    """While anybody decodes, only decode; a chunk of the next prompt is computed when nobody does, when the batch has
    shrunk below `least_batch`, and at the latest after `patience_steps` decode steps without one.

    Source: decode-prioritising schedulers, in the words of Sarathi-Serve (OSDI'24, section 3): FasterTransformer lets a
    batch decode to its end before it takes prompts on. The bound is ours: without it one long output could keep every
    prompt waiting.
    """

    patience_steps: int = 8  # decode steps after which a waiting prompt's next chunk is computed all the same
    least_batch: int = 1  # with fewer sequences decoding, prompts go first
    _decoded: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        for name, value in (("patience_steps", self.patience_steps), ("least_batch", self.least_batch)):
            if value < 1:
                raise ConfigError(f"sched.batching.{name}", value, "must be at least 1")

    def choose(self, waiting_tokens: Sequence[int], decoding: int, chunk_tokens: int) -> Batch:
        if waiting_tokens and (decoding < self.least_batch or self._decoded >= self.patience_steps):
            self._decoded = 0
            return Batch(((0, min(waiting_tokens[0], chunk_tokens)),), decode=False)
        self._decoded += 1
        return Batch((), decode=decoding > 0)
