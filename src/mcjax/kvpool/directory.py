"""Who holds which block, as far as the conductor knows: what was reported, and what its own decisions will bring."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from mcjax.types import BlockId

FEW = 6
"""Nodes up to which taking bit by bit is quicker than unpacking a mask."""


class Directory:
    """A bit mask of nodes a block. Matching walks a prefix once for all nodes together.

    Blocks that are reported together mostly have the same holders before and after: they share one mask, which among a
    thousand nodes would take more memory than all the rest.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, int] = {}
        self._masks: dict[BlockId, int] = {}
        self._expected: dict[BlockId, int] = {}
        self._expected_counts: dict[int, dict[BlockId, int]] = {}

    def node_index(self, node: str) -> int:
        """The bit of a node, given out at first mention."""
        return self._nodes.setdefault(node, len(self._nodes))

    @property
    def nodes(self) -> int:
        return len(self._nodes)

    def __len__(self) -> int:
        return len(self._masks)

    def add(self, node: int, blocks: Iterable[BlockId]) -> None:
        bit, masks = 1 << node, self._masks
        before, after = None, bit
        for block in blocks:
            mask = masks.get(block)
            if mask is not before:
                before, after = mask, bit if mask is None else mask | bit
            masks[block] = after

    def remove(self, node: int, blocks: Iterable[BlockId]) -> None:
        others, masks = ~(1 << node), self._masks
        before, after = None, 0
        for block in blocks:
            mask = masks.get(block)
            if mask is None:
                continue
            if mask is not before:
                before, after = mask, mask & others
            if after:
                masks[block] = after
            else:
                del masks[block]

    def expect(self, node: int, blocks: Iterable[BlockId]) -> None:
        """An own decision will put these blocks on `node`; undone by `unexpect` once reports can tell."""
        bit, expected = 1 << node, self._expected
        counts = self._expected_counts.setdefault(node, {})
        for block in blocks:
            counts[block] = counts.get(block, 0) + 1
            expected[block] = expected.get(block, 0) | bit

    def unexpect(self, node: int, blocks: Iterable[BlockId]) -> None:
        others, expected, counts = ~(1 << node), self._expected, self._expected_counts.setdefault(node, {})
        for block in blocks:
            count = counts[block] - 1
            if count:
                counts[block] = count
                continue
            del counts[block]
            left = expected[block] & others
            if left:
                expected[block] = left
            else:
                del expected[block]

    def drop_node(self, node: int) -> None:
        """The node is gone, and everything reported of it."""
        bit = 1 << node
        self.remove(node, [block for block, mask in self._masks.items() if mask & bit])

    def holders(self, block: BlockId) -> list[int]:
        """Nodes reported to hold `block`, lowest first."""
        return _bits(self._masks.get(block, 0))

    def holders_of(self, blocks: Sequence[BlockId]) -> list[int]:
        """Nodes reported to hold every one of `blocks`, lowest first."""
        masks, held = self._masks, -1
        for block in blocks:
            held &= masks.get(block, 0)
            if not held:
                return []
        return _bits(held) if blocks else []

    def prefix_blocks(self, blocks: Sequence[BlockId]) -> NDArray[np.int64]:
        """`[nodes]` how many leading blocks each node holds, or is expected to hold."""
        lengths = np.zeros(len(self._nodes), np.int64)
        masks, expected = self._masks, self._expected
        alive = (1 << len(self._nodes)) - 1
        for depth, block in enumerate(blocks):
            mask = masks.get(block, 0) | expected.get(block, 0)
            if mask & alive != alive:
                if depth:
                    _set(lengths, alive & ~mask, depth)
                alive &= mask
                if not alive:
                    return lengths
        _set(lengths, alive, len(blocks))
        return lengths


def _set(lengths: NDArray[np.int64], nodes: int, length: int) -> None:
    """`length` for every node whose bit is in `nodes`."""
    if nodes.bit_count() <= FEW:
        while nodes:
            last = nodes.bit_length() - 1
            lengths[last] = length
            nodes ^= 1 << last
        return
    raw = np.frombuffer(nodes.to_bytes(len(lengths) // 8 + 1, "little"), np.uint8)
    lengths[np.unpackbits(raw, count=len(lengths), bitorder="little").view(np.bool_)] = length


def _bits(mask: int) -> list[int]:
    found: list[int] = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
