"""What of the waiting prompts goes into a step: asks the strategies, and refuses what could never end."""

from __future__ import annotations

from collections.abc import Sequence as PySequence
from typing import overload

from mcjax.engine.sequence import Sequence
from mcjax.errors import ConfigError
from mcjax.sched.base import Batch, Batching, Tenancy, strategy_name


class InTurn(PySequence[int]):
    """Prompt tokens that are still to be computed, in the order that tenancy wants, found as far as somebody looks.

    `sequences[i]` is whose the i-th are, of those that were looked at.
    """

    def __init__(self, prompts: PySequence[Sequence], tenancy: Tenancy):
        self.sequences: list[Sequence] = []
        self._left = list(prompts)
        self._tenancy = tenancy

    def __len__(self) -> int:
        return len(self.sequences) + len(self._left)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        while len(self.sequences) <= at:
            self._next()
        sequence = self.sequences[at]
        return sequence.end - sequence.item.start

    def _next(self) -> None:
        left = self._left
        if not left:
            raise IndexError
        first = self._tenancy.next([sequence.request for sequence in left]) if len(left) > 1 else 0
        if not 0 <= first < len(left):
            raise ConfigError("sched.tenancy", strategy_name(self._tenancy), f"chose prompt {first} of {len(left)}")
        self.sequences.append(left.pop(first))


def choose(
    prompts: PySequence[Sequence], tenancy: Tenancy, batching: Batching, decoding: int, chunk_tokens: int
) -> tuple[list[tuple[Sequence, int]], bool]:
    """Chunks of the next step, and whether the decodes join in."""
    if len(prompts) == 1:  # as nearly always: nobody's turn need be found
        sequence = prompts[0]
        waiting, sequences = [sequence.end - sequence.item.start], prompts
    else:
        waiting = InTurn(prompts, tenancy)
        sequences = waiting.sequences
    batch = batching.choose(waiting, decoding, chunk_tokens)
    _check(batch, waiting, decoding, chunk_tokens, batching)
    return [(sequences[index], tokens) for index, tokens in batch.chunks], batch.decode


def _check(batch: Batch, waiting: PySequence[int], decoding: int, chunk_tokens: int, batching: Batching) -> None:
    """A strategy may be a user's own: what could never end, or would overrun a prompt, is refused here."""
    if batch.chunks == ((0, waiting[0]),) and 0 < waiting[0] <= chunk_tokens:
        return
    name = strategy_name(batching)
    if not batch.chunks and not (batch.decode and decoding):
        raise ConfigError("sched.batching", name, f"chose nothing while {len(waiting)} prompts wait")
    indices = [index for index, _ in batch.chunks]
    if len(dict.fromkeys(indices)) != len(indices) or not all(0 <= index < len(waiting) for index in indices):
        raise ConfigError("sched.batching", name, f"chose prompts {indices} of {len(waiting)}")
    for index, tokens in batch.chunks:
        room = min(chunk_tokens, waiting[index])
        if not 1 <= tokens <= room:
            raise ConfigError("sched.batching", name, f"chose a chunk of {tokens} tokens where 1 to {room} go")
