"""Evict what came first, however often it was used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from mcjax.types import BlockId


class FIFO:
    """First in, first out, as far as leaves go: a block cannot leave before what continues it, and so takes its place
    anew, behind them, when a request puts new blocks behind it."""

    def __init__(self) -> None:
        self._queue: OrderedDict[BlockId, None] = OrderedDict()

    def on_insert(self, blocks: Sequence[BlockId], parent: BlockId | None) -> None:
        self._queue.update(dict.fromkeys(reversed(blocks)))

    def on_hit(self, blocks: Sequence[BlockId]) -> None:
        """Changes nothing."""

    def on_extend(self, blocks: Sequence[BlockId]) -> None:
        move = self._queue.move_to_end
        for block in reversed(blocks):
            move(block)

    def on_remove(self, blocks: Sequence[BlockId]) -> None:
        queue = self._queue
        for block in blocks:
            del queue[block]

    def victims(self) -> Iterator[BlockId]:
        return iter(self._queue)
