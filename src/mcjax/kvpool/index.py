"""Which blocks are resident in a pool, where they lie, whom each continues, and what pins them.

A dict a property, not an object a block: whole runs of a chain go in, and are found, at the speed of C.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress, pairwise, repeat
from operator import not_

from mcjax.errors import IntegrityError
from mcjax.kvpool.holds import Anchor
from mcjax.types import BlockId


class BlockIndex:
    """A block is in here only while the block before it is, so that a match is a run from the start."""

    def __init__(self) -> None:
        self.slots: dict[BlockId, int] = {}
        """Every resident block, in order of insertion: parents come before children."""
        self.anchors: dict[BlockId, Anchor] = {}
        """Of blocks that some pin ends at."""
        self._parents: dict[BlockId, BlockId | None] = {}
        self._children: dict[BlockId, int] = {}
        self._checksums: dict[BlockId, bytes] = {}

    def __len__(self) -> int:
        return len(self.slots)

    def leading(self, blocks: Sequence[BlockId]) -> int:
        """How many leading blocks are resident."""
        found = list(map(self.slots.get, blocks))
        return found.index(None) if None in found else len(found)

    def slots_of(self, blocks: Iterable[BlockId]) -> list[int]:
        """Raises `KeyError` with the first that is not resident."""
        return list(map(self.slots.__getitem__, blocks))

    def checksums_of(self, blocks: Sequence[BlockId]) -> tuple[bytes, ...]:
        """Empty ones in worlds without bytes. Raises `KeyError` like `slots_of`."""
        self.slots_of(blocks)
        return tuple(map(self._checksums.get, blocks, repeat(b""))) if self._checksums else (b"",) * len(blocks)

    def children(self, block: BlockId) -> int:
        """How many resident blocks continue it."""
        return self._children.get(block, 0)

    def insert(
        self, blocks: Sequence[BlockId], slots: Sequence[int], parent: BlockId | None, checksums: Sequence[bytes]
    ) -> tuple[Sequence[BlockId], Sequence[int], list[int]]:
        """A run of one chain behind `parent`. Returns what is new, its slots, and the slots of what was here before."""
        known = list(map(self.slots.__contains__, blocks))
        if True not in known:
            self._insert_run(blocks, slots, parent, checksums)
            return blocks, slots, []
        new = list(map(not_, known))
        # Of a chain only the head can be known; ids that a trace gives to more than one prefix may be known anywhere.
        start = 0
        while start < len(blocks):
            end = start + 1
            while end < len(blocks) and new[end] == new[start]:
                end += 1
            if new[start]:
                before = blocks[start - 1] if start else parent
                self._insert_run(blocks[start:end], slots[start:end], before, checksums[start:end])
            start = end
        return list(compress(blocks, new)), list(compress(slots, new)), list(compress(slots, known))

    def _insert_run(
        self, blocks: Sequence[BlockId], slots: Sequence[int], parent: BlockId | None, checksums: Sequence[bytes]
    ) -> None:
        self.slots.update(zip(blocks, slots, strict=True))
        self._parents.update(zip(blocks, chain((parent,), blocks[:-1]), strict=True))
        self._children.update(dict.fromkeys(blocks[:-1], 1))
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        if any(checksums):
            self._checksums.update(zip(blocks, checksums, strict=True))

    def remove(self, blocks: Sequence[BlockId]) -> tuple[list[int], list[Anchor]]:
        """Take blocks out, children before their parents. Returns the slots of those that nothing pins, and the anchors
        of the others: their slots stay taken until they are unpinned."""
        slots: list[int] = []
        anchors: list[Anchor] = []
        all_slots, parents, children, checksums = self.slots, self._parents, self._children, self._checksums
        for block in blocks:
            slot = all_slots.pop(block)
            parent = parents.pop(block)
            children.pop(block, None)
            if parent is not None:
                children[parent] -= 1
            if checksums:
                checksums.pop(block, None)
            anchor = self.anchors.pop(block, None) if self.anchors else None
            if anchor is None:
                slots.append(slot)
            else:
                anchor.detached = True
                anchors.append(anchor)
        return slots, anchors

    def anchor(self, block: BlockId) -> Anchor:
        """One more pin ends at `block`."""
        anchor = self.anchors.get(block)
        if anchor is None:
            anchor = self.anchors[block] = Anchor(block, self.slots[block])
        anchor.pins += 1
        return anchor

    def continued_by(self, blocks: Iterable[BlockId]) -> list[BlockId]:
        """`blocks` as far as they are resident, and all that continues them, parents first."""
        named = dict.fromkeys(blocks)
        if self.slots.keys().isdisjoint(named):
            return []
        found: dict[BlockId, None] = {}
        for block, parent in self._parents.items():
            if block in named or parent in found:
                found[block] = None
        return list(found)

    def runs(self, blocks: Sequence[BlockId]) -> list[Sequence[BlockId]]:
        """Resident `blocks`, parents before children, cut into spans: each block of one continues the block before."""
        parents = self._parents
        cuts = [at for at in range(1, len(blocks)) if parents[blocks[at]] != blocks[at - 1]]
        return [blocks[start:end] for start, end in pairwise([0, *cuts, len(blocks)])]

    def victims(self, order: Iterator[BlockId], count: int) -> list[BlockId]:
        """Up to `count` blocks to evict: again and again the first in `order` with neither pins nor children left."""
        chosen: list[BlockId] = []
        leaving: dict[BlockId, int] = {}
        passed: dict[BlockId, None] = {}
        anchors, children, parents = self.anchors, self._children, self._parents
        for first in order:
            block = first
            while block not in anchors and children.get(block, 0) == leaving.get(block, 0):
                chosen.append(block)
                if len(chosen) == count:
                    return chosen
                parent = parents[block]
                if parent is None:
                    break
                leaving[parent] = leaving.get(parent, 0) + 1
                if parent not in passed:
                    break
                block = parent  # its turn has been, it only had a child then: nothing comes before it
            else:
                passed[block] = None
        return chosen

    def check_integrity(self, name: str) -> None:
        """Raise `IntegrityError` unless parents and children add up."""
        children: dict[BlockId, int] = {}
        for block in self.slots:
            parent = self._parents[block]
            if parent is not None:
                if parent not in self.slots:
                    raise IntegrityError(f"{name}: block {block} is resident without its parent")
                children[parent] = children.get(parent, 0) + 1
        for block in self.slots:
            if self.children(block) != children.get(block, 0):
                raise IntegrityError(f"{name}: block {block} miscounts its children")
        if self._parents.keys() != self.slots.keys() or not self._children.keys() <= self.slots.keys():
            raise IntegrityError(f"{name}: something is remembered of blocks that are gone")
