"""What a cluster's pools had and lost: a bounded memory, so that a miss can be told from a block never seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mcjax.types import BlockId, Miss


class Gone:
    """Blocks that left a pool: the latest, as many as the pools can hold, and at most as many again. One a cluster:
    where a block was does not matter.

    It decides nothing. A block that came back, or is elsewhere still, is found there first, so nobody asks for it here.
    Two generations, of which the older one is forgotten as a whole, so that remembering costs a block next to nothing.
    """

    def __init__(self) -> None:
        self._latest: dict[BlockId, Miss] = {}
        self._before: dict[BlockId, Miss] = {}
        self._capacity = 0

    def __len__(self) -> int:
        return len(self._latest.keys() | self._before.keys())

    def widen(self, capacity: int) -> None:
        """A pool of `capacity` blocks has joined."""
        self._capacity += capacity

    def note(self, blocks: Sequence[BlockId], cause: Miss) -> None:
        if len(self._latest) + len(blocks) > self._capacity:
            self._before, self._latest = self._latest, {}
        self._latest.update(dict.fromkeys(blocks, cause))

    def causes(self, blocks: Sequence[BlockId]) -> Iterator[Miss]:
        """Why the leading ones of `blocks` are gone, as far as that is remembered."""
        for block in blocks:
            cause = self._latest.get(block) or self._before.get(block)
            if cause is None:
                return
            yield cause
