"""What is looked at of a workload before a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mcjax.app.sample import uncached_tokens
from mcjax.types import Request, Script, Tokens
from mcjax.workload.base import Session, Turn


class Talk:
    start_ns = 0

    def __init__(self, turns: Sequence[tuple[list[int], int]]):
        self._turns = list(turns)

    def next_turn(self, answer: Tokens | None) -> Turn | None:
        assert answer is None
        if not self._turns:
            return None
        prompt, output = self._turns.pop(0)
        return Turn(Request(0, 0, len(prompt), output, np.array(prompt, np.int32)), Script(output))


class Talks:
    name = "talks"
    block_tokens: int | None = None

    def __init__(self, *talks: list[tuple[list[int], int]]):
        self._talks = talks

    def sessions(self) -> Iterator[Session]:
        return iter([Talk(turns) for turns in self._talks])

    def inputs(self) -> dict[str, str]:
        return {}


def test_earlier_blocks_are_at_hand_and_decoded_ones_in_the_second_number() -> None:
    first = list(range(10))
    workload = Talks([(first, 6), ([*first, *range(50, 60)], 4)], [([*first[:4], 99, 98, 97, 96, 95], 1)])
    # Blocks of 4: the second turn finds 8 of its 20 tokens, or 16 with the answer of 6; the other session finds 4 of 9.
    assert uncached_tokens(workload, 4) == [10, 10, 12, 4, 5, 5]


def test_a_prompt_seen_before_needs_its_last_token() -> None:
    assert uncached_tokens(Talks([([1, 2], 1)], [([1, 2], 1)]), 2) == [2, 2, 1, 1]


def test_a_block_counts_only_behind_those_before_it() -> None:
    assert uncached_tokens(Talks([([1, 2, 3, 4], 1)], [([9, 9, 3, 4], 1)]), 2) == [4, 4, 4, 4]


def test_a_sample_is_no_longer_than_asked() -> None:
    talks = [[([1, 2], 1)] * 3] * 3
    assert len(uncached_tokens(Talks(*talks), 2, most=4)) == 8
