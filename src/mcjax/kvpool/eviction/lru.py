"""Evict what has not been used for longest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from mcjax.types import BlockId


class LRU:
    """Least recently used first. The pool touches a chain from its end to its start, so suffixes go before prefixes."""

    def __init__(self) -> None:
        self._order: OrderedDict[BlockId, None] = OrderedDict()

    def on_insert(self, block: BlockId, parent: BlockId | None) -> None:
        self._order[block] = None

    def on_hit(self, block: BlockId) -> None:
        self._order.move_to_end(block)

    def on_remove(self, block: BlockId) -> None:
        del self._order[block]

    def victims(self) -> Iterator[BlockId]:
        return iter(self._order)
