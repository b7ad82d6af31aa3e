"""Evict what was used least often; among equals, what lies furthest from the start of its prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mcjax.kvpool.eviction.ranks import Ranks
from mcjax.types import BlockId

_POSITIONS = 1 << 32
"""More blocks than a prompt can have: a count times this, less the position, sorts by count and then by position."""


class LengthAware:
    """LengthAwareCache of Table 1 of Mooncake's technical report (arXiv 2407.00079v3): like LFU, "but it prioritizes
    evicting cache blocks occurring later in requests".

    The report does not say how much. Here the position breaks the ties of LFU; blocks of the same position go in the
    order of their last use. Preferring the *front* of prompts would orphan what follows it.
    """

    def __init__(self) -> None:
        self._ranks = Ranks()

    def on_insert(self, blocks: Sequence[BlockId], parent: BlockId | None) -> None:
        move, first = self._ranks.move, 0 if parent is None else -self._ranks[parent] % _POSITIONS + 1
        for position in reversed(range(len(blocks))):
            move(blocks[position], _POSITIONS - first - position)

    def on_hit(self, blocks: Sequence[BlockId]) -> None:
        ranks = self._ranks
        for block in reversed(blocks):
            ranks.move(block, ranks[block] + _POSITIONS)

    def on_remove(self, blocks: Sequence[BlockId]) -> None:
        self._ranks.remove(blocks)

    def victims(self) -> Iterator[BlockId]:
        return iter(self._ranks)
