"""Evict what was used least often since it came."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mcjax.kvpool.eviction.ranks import Ranks
from mcjax.types import BlockId


class LFU:
    """Fewest uses first; among equals the one whose last use is longest ago, suffixes before prefixes.

    A block's count begins at one when it is inserted and is forgotten when it leaves: the policy called LFU in Table 1
    of Mooncake's technical report (arXiv 2407.00079v3), as far as it is described there.
    """

    def __init__(self) -> None:
        self._uses = Ranks()

    def on_insert(self, blocks: Sequence[BlockId], parent: BlockId | None) -> None:
        self._uses.add(blocks[::-1], 1)

    def on_hit(self, blocks: Sequence[BlockId]) -> None:
        uses = self._uses
        for block in reversed(blocks):
            uses.move(block, uses[block] + 1)

    def on_extend(self, blocks: Sequence[BlockId]) -> None:
        uses = self._uses
        for block in reversed(blocks):  # or of equals the head of a chain would go before its tail
            uses.move(block, uses[block])

    def on_remove(self, blocks: Sequence[BlockId]) -> None:
        self._uses.remove(blocks)

    def victims(self) -> Iterator[BlockId]:
        return iter(self._uses)
