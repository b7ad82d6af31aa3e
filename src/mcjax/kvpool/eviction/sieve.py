"""Evict what was not used since a hand last passed it: SIEVE (Zhang et al., NSDI'24)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain, filterfalse

from mcjax.types import BlockId


class Sieve:
    """A queue in the order of insertion that nothing moves in, a bit a block, and a hand that goes from the oldest
    block to the newest and round again. The hand takes the first block without its bit, and clears the bits it passes.

    What the hand comes to and the pool cannot let go (it is pinned, or something continues it) is passed like a block
    that was used. The hand moves only with what leaves: asking for victims alone changes no order.
    """

    def __init__(self) -> None:
        self._ahead: OrderedDict[BlockId, None] = OrderedDict()
        """What the hand has still to come to in this round, in its order; new blocks come last. Empty only if all
        is."""
        self._behind: OrderedDict[BlockId, None] = OrderedDict()
        """What it has passed, older than all that is ahead."""
        self._used: dict[BlockId, None] = {}
        self._asked = False

    def on_insert(self, blocks: Sequence[BlockId], parent: BlockId | None) -> None:
        self._ahead.update(dict.fromkeys(reversed(blocks)))

    def on_hit(self, blocks: Sequence[BlockId]) -> None:
        self._used.update(dict.fromkeys(blocks))

    def on_extend(self, blocks: Sequence[BlockId]) -> None:
        used, ahead = self._used, self._ahead
        for block in reversed(blocks):  # or the hand would come to a chain's head first, and pass it
            if block in ahead and block not in used:
                ahead.move_to_end(block)

    def on_remove(self, blocks: Sequence[BlockId]) -> None:
        if self._asked and blocks:  # else they were not evicted: found corrupt, or their node died
            self._turn(blocks)
        self._asked = False
        for block in blocks:
            self._used.pop(block, None)
            if block in self._ahead:
                del self._ahead[block]
            elif block in self._behind:
                del self._behind[block]
        if not self._ahead:
            self._ahead, self._behind = self._behind, self._ahead

    def victims(self) -> Iterator[BlockId]:
        self._asked = True
        used, ahead, behind = self._used.__contains__, self._ahead, self._behind
        return chain(filterfalse(used, ahead), filterfalse(used, behind), filter(used, ahead), filter(used, behind))

    def _turn(self, blocks: Sequence[BlockId]) -> None:
        """Move the hand behind the last of `blocks` that it comes to. What it takes on its way is gone already."""
        used = self._used
        late = [block for block in blocks if block in used]
        if late:  # it has been all round, and every bit is cleared
            used.clear()
        leaving = dict.fromkeys(late or blocks)
        left = sum(map(self._ahead.__contains__, leaving))
        if left < len(leaving):
            for block in self._ahead:
                used.pop(block, None)
            left = len(leaving) - left
            self._behind.update(self._ahead)
            self._ahead, self._behind = self._behind, OrderedDict()
        while left:
            block, _ = self._ahead.popitem(last=False)
            if block in leaving:
                left -= 1
            else:
                used.pop(block, None)
                self._behind[block] = None
