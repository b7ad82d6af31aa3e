"""Evict by three queues that nothing is moved within: S3-FIFO (Yang et al., SOSP'23)."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

from mcjax.types import BlockId

MOST_USES = 3
SMALL_TENTHS, GHOST_TENTHS = 1, 9
"""Of all blocks, the small queue's share, and how many names of departed ones are remembered (as many as main has)."""


class S3FIFO:
    """New blocks enter a small queue (a tenth of all). Used at least twice there, a block goes on to the main queue;
    else it leaves, and its name is remembered for a while: coming again, it enters main at once. Main's oldest leaves
    if it was not used since it was last the oldest; else it goes round, at most `MOST_USES` times.

    Sizes are shares of what is resident, which of a full pool is its capacity. What has its turn and the pool cannot
    let go (it is pinned, or something continues it) goes to the end of main. The queues move only with what leaves:
    asking for victims alone changes no order.
    """

    def __init__(self) -> None:
        self._small: OrderedDict[BlockId, None] = OrderedDict()
        self._main: OrderedDict[BlockId, None] = OrderedDict()
        self._ghosts: OrderedDict[BlockId, None] = OrderedDict()
        self._uses: dict[BlockId, int] = {}
        self._asked = False

    def on_insert(self, blocks: Sequence[BlockId], parent: BlockId | None) -> None:
        if self._ghosts.keys().isdisjoint(blocks):
            self._small.update(dict.fromkeys(reversed(blocks)))
            return
        for block in reversed(blocks):
            if block in self._ghosts:
                del self._ghosts[block]
                self._main[block] = None
            else:
                self._small[block] = None

    def on_hit(self, blocks: Sequence[BlockId]) -> None:
        uses = self._uses
        for block in blocks:
            uses[block] = min(uses.get(block, 0) + 1, MOST_USES)

    def on_extend(self, blocks: Sequence[BlockId]) -> None:
        small = self._small
        for block in reversed(blocks):  # or a chain's head would have its turn before its tail
            if block in small:
                small.move_to_end(block)

    def on_remove(self, blocks: Sequence[BlockId]) -> None:
        if self._asked and blocks:  # else they were not evicted: found corrupt, or their node died
            self._turn(blocks)
        self._asked = False
        for block in blocks:
            self._uses.pop(block, None)
            if block in self._small:
                del self._small[block]
            else:
                del self._main[block]

    def victims(self) -> Iterator[BlockId]:
        self._asked = True
        return self._walk([])

    def _walk(self, moved: list[BlockId]) -> Iterator[BlockId]:
        """What leaves, one after the other; `moved` gets what goes to the end of main meanwhile."""
        small, main = len(self._small), len(self._main)
        in_small, in_main = iter(self._small), iter(self._main)
        again: deque[tuple[BlockId, int]] = deque()
        uses_of = self._uses.get
        while small or main:
            if small and (10 * small >= SMALL_TENTHS * (small + main) or not main):
                block = next(in_small)
                small -= 1
                if uses_of(block, 0) > 1:
                    main += 1
                    again.append((block, 0))
                    moved.append(block)
                    continue
            else:
                found = next(in_main, None)
                block, uses = again.popleft() if found is None else (found, uses_of(found, 0))
                if uses:
                    again.append((block, uses - 1))
                    moved.append(block)
                    continue
                main -= 1
            yield block

    def _turn(self, blocks: Sequence[BlockId]) -> None:
        """Do what it took until all of `blocks` had their turn."""
        small, main, uses = self._small, self._main, self._uses
        remembered = GHOST_TENTHS * (len(small) + len(main)) // 10
        left = dict.fromkeys(blocks)
        moved: list[BlockId] = []
        for block in self._walk(moved):
            if block not in left:
                moved.append(block)
                continue
            del left[block]
            if not left:
                break
        for block in moved:
            if block in small:
                del small[block]
                uses.pop(block, None)
                main[block] = None
            else:
                main.move_to_end(block)
                uses[block] = max(0, uses.get(block, 0) - 1)
        self._ghosts.update(dict.fromkeys(block for block in blocks if block in small))
        while len(self._ghosts) > remembered:
            self._ghosts.popitem(last=False)
