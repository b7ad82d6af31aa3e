"""Blocks in buckets of equal rank: what orders that one queue cannot keep are made of."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from itertools import chain, groupby

from mcjax.types import BlockId


class Ranks:
    """Iterates from the lowest rank up, and within a rank in the order in which blocks came to it.

    A step costs a dict operation, and the bisection of the list of ranks where a bucket opens or empties: nothing is
    ever sorted as a whole.
    """

    def __init__(self) -> None:
        self._ranks: dict[BlockId, int] = {}
        self._buckets: dict[int, OrderedDict[BlockId, None]] = {}
        self._order: list[int] = []
        """The ranks that some block has, ascending."""

    def __len__(self) -> int:
        return len(self._ranks)

    def __getitem__(self, block: BlockId) -> int:
        return self._ranks[block]

    def __iter__(self) -> Iterator[BlockId]:
        return chain.from_iterable(map(self._buckets.__getitem__, self._order))

    def lowest(self) -> int:
        """The rank of the first block; 0 if there is none."""
        return self._order[0] if self._order else 0

    def add(self, blocks: Sequence[BlockId], rank: int) -> None:
        """Blocks that have no rank yet, in this order."""
        (self._buckets.get(rank) or self._open(rank)).update(dict.fromkeys(blocks))
        self._ranks.update(dict.fromkeys(blocks, rank))

    def move(self, block: BlockId, rank: int) -> None:
        """Give `block` this rank, behind all others of it, whatever rank it has now, if any."""
        before = self._ranks.get(block)
        if before == rank:
            self._buckets[rank].move_to_end(block)
            return
        if before is not None:
            bucket = self._buckets[before]
            del bucket[block]
            if not bucket:
                self._close(before)
        self._ranks[block] = rank
        bucket = self._buckets.get(rank)
        if bucket is None:
            bucket = self._open(rank)
        bucket[block] = None

    def remove(self, blocks: Sequence[BlockId]) -> None:
        """Raises `KeyError` with the first that has no rank."""
        at = 0
        for rank, same in groupby(list(map(self._ranks.pop, blocks))):
            end = at + sum(1 for _ in same)
            bucket = self._buckets[rank]
            deque(map(bucket.__delitem__, blocks[at:end]), maxlen=0)
            if not bucket:
                self._close(rank)
            at = end

    def _open(self, rank: int) -> OrderedDict[BlockId, None]:
        insort(self._order, rank)
        bucket = self._buckets[rank] = OrderedDict()
        return bucket

    def _close(self, rank: int) -> None:
        del self._buckets[rank]
        del self._order[bisect_left(self._order, rank)]
