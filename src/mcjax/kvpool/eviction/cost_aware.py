"""Evict what is cheapest to compute again for how often it is used: GreedyDual-Size-Frequency (Cherkasova 1998)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import compress, repeat

from mcjax.cost.base import CostModel
from mcjax.kvpool.eviction.ranks import Ranks
from mcjax.types import BlockId

GRAIN = 64
"""The worth of one use of a prompt's first block; other blocks cost whole multiples of a 64th of it."""
_ORPHANED = -1


class CostAware:
    """A block is worth `clock + uses * cost`, where the cost is the prefill time of its tokens behind its prefix, a
    byte, and the clock the least worth in the pool as blocks last left: what is not used any more loses against it.

    All blocks of a pool have the same size, so a cost a byte is a cost a block. Attention makes a deep block dearer
    than an early one. What continues a block is worth nothing without it: so of blocks that came or were hit together
    none is worth less than those behind it, and what has lost its prefix goes before all else. Until `use_cost` all
    blocks cost the same (LFU that ages).
    """

    def __init__(self) -> None:
        self._worth = Ranks()
        self._clock = 0
        self._uses: dict[BlockId, int] = {}
        self._depths: dict[BlockId, int] = {}
        self._parents: dict[BlockId, BlockId | None] = {}
        self._children: dict[BlockId, int] = {}
        self._cost: CostModel | None = None
        self._block_tokens = 0
        self._prices: list[int] = []

    def use_cost(self, cost: CostModel, block_tokens: int) -> None:
        """What computing a block takes."""
        self._cost, self._block_tokens, self._prices = cost, block_tokens, []

    def on_insert(self, blocks: Sequence[BlockId], parent: BlockId | None) -> None:
        first = 0 if parent is None else self._depths.get(parent, -1) + 1
        end = first + len(blocks)
        self._depths.update(zip(blocks, range(first, end), strict=True))
        self._parents.update(zip(blocks, (parent, *blocks[:-1]), strict=True))
        self._children.update(dict.fromkeys(blocks[:-1], 1))
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        self._uses.update(dict.fromkeys(blocks, 1))
        self._worth.add(blocks[::-1], self._clock + max(self._prices_to(end)[first:end]))

    def on_hit(self, blocks: Sequence[BlockId]) -> None:
        worth, uses, clock, prices = self._worth, self._uses, self._clock, self._prices_to(len(blocks))
        most = 0  # of what continues the block, as far as this request has it
        for depth in reversed(range(len(blocks))):
            block = blocks[depth]
            count = uses[block] = uses[block] + 1
            most = max(most, clock + count * prices[depth], worth[block])
            worth.move(block, most)

    def on_extend(self, blocks: Sequence[BlockId]) -> None:
        worth, most = self._worth, 0
        for block in reversed(blocks):
            if worth[block] < most:
                worth.move(block, most)
            else:
                most = worth[block]

    def on_remove(self, blocks: Sequence[BlockId]) -> None:
        self._clock = max(self._clock, self._worth.lowest())
        self._worth.remove(blocks)
        children = self._children
        for parent in map(self._parents.pop, blocks):
            if parent in children:
                children[parent] -= 1
        left = list(map(children.pop, blocks, repeat(0)))
        for of_each in (self._uses, self._depths):
            deque(map(of_each.pop, blocks), maxlen=0)
        if any(left):
            self._orphan(dict.fromkeys(compress(blocks, left)))

    def victims(self) -> Iterator[BlockId]:
        return iter(self._worth)

    def _prices_to(self, end: int) -> Sequence[int]:
        """What one use of a block is worth, by its depth, at least up to `end`."""
        prices, tokens = self._prices, self._block_tokens
        while len(prices) < end:
            price = GRAIN
            if self._cost is not None:
                first_ns = max(1, self._cost.prefill_ns(0, tokens))
                there_ns = self._cost.prefill_ns(len(prices) * tokens, tokens)
                price = max(1, GRAIN * there_ns // first_ns)
            prices.append(price)
        return prices

    def _orphan(self, gone: dict[BlockId, None]) -> None:
        """Whatever continues a block that has left. A pool that evicts leaves only never comes to this."""
        lost: list[BlockId] = []
        for block, parent in self._parents.items():  # parents come before children
            if parent in gone:
                gone[block] = None
                lost.append(block)
        for block in reversed(lost):
            self._worth.move(block, _ORPHANED)
