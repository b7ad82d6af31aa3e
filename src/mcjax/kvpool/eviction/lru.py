"""Evict what has not been used for longest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from mcjax.types import BlockId


class LRU:
    """Least recently used first; of a chain touched at once, suffixes go before prefixes."""

    def __init__(self) -> None:
        self._order: OrderedDict[BlockId, None] = OrderedDict()

    def on_insert(self, blocks: Sequence[BlockId], parent: BlockId | None) -> None:
        self._order.update(dict.fromkeys(reversed(blocks)))

    def on_hit(self, blocks: Sequence[BlockId]) -> None:
        move = self._order.move_to_end
        for block in reversed(blocks):
            move(block)

    def on_extend(self, blocks: Sequence[BlockId]) -> None:
        self.on_hit(blocks)  # or a chain's head would look older than its tail

    def on_remove(self, blocks: Sequence[BlockId]) -> None:
        order = self._order
        for block in blocks:
            del order[block]

    def victims(self) -> Iterator[BlockId]:
        return iter(self._order)
