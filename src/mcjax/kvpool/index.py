"""Which blocks are resident in a pool, where they lie, whom each continues, and what pins them.

A dict a property, not an object a block: whole runs of a chain go in, and are found, at the speed of C.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, compress, islice, pairwise, repeat
from operator import eq, not_

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
        self.lossy: dict[BlockId, None] = {}
        """Blocks whose numbers an encoding has rounded, or were computed from such; what continues one is one too."""

    def __len__(self) -> int:
        return len(self.slots)

    def leading(self, blocks: Sequence[BlockId]) -> int:
        """How many leading blocks are resident."""
        found = list(map(self.slots.get, blocks))
        return found.index(None) if None in found else len(found)

    def exact(self, blocks: Sequence[BlockId]) -> int:
        """How many leading blocks are not lossy."""
        if not self.lossy:
            return len(blocks)
        found = list(map(self.lossy.__contains__, blocks))
        return found.index(True) if True in found else len(found)

    def slots_of(self, blocks: Iterable[BlockId]) -> list[int]:
        """Raises `KeyError` with the first that is not resident."""
        return list(map(self.slots.__getitem__, blocks))

    def checksums_of(self, blocks: Sequence[BlockId]) -> tuple[bytes, ...]:
        """Empty ones in worlds without bytes. Raises `KeyError` like `slots_of`."""
        self.slots_of(blocks)
        return tuple(map(self._checksums.get, blocks, repeat(b""))) if self._checksums else (b"",) * len(blocks)

    def parent(self, block: BlockId) -> BlockId | None:
        """The block that a resident one continues; None at a start."""
        return self._parents[block]

    def chain(self, block: BlockId) -> Sequence[BlockId]:
        """The prefix that ends with a resident block, from its start."""
        found = [block]
        while (parent := self._parents[found[-1]]) is not None:
            found.append(parent)
        return found[::-1]

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

    def refine(self, blocks: Sequence[BlockId], slots: list[int], checksums: Sequence[bytes]) -> list[BlockId]:
        """Exact bytes have come, in `slots`, for blocks of which some are lossy here: they take the place of those,
        whose old slots stand in `slots` now. Returns them."""
        refined = [block for block in blocks if block in self.lossy]
        for at, block in enumerate(blocks) if refined else ():
            if block not in self.lossy:
                continue
            del self.lossy[block]
            self.slots[block], slots[at] = slots[at], self.slots[block]
            if checksums:
                self._checksums[block] = checksums[at]
            if block in self.anchors:
                self.anchors[block].slot = self.slots[block]
        return refined

    def remove(self, blocks: Sequence[BlockId]) -> tuple[list[int], list[Anchor]]:
        """Take blocks out, children before their parents. Returns the slots of those that nothing pins, and the anchors
        of the others: their slots stay taken until they are unpinned."""
        taken = list(map(self.slots.pop, blocks))
        parents = list(map(self._parents.pop, blocks))
        children = self._children
        deque(map(children.pop, blocks, repeat(None)), maxlen=0)
        for parent in parents:
            if parent in children:  # else it leaves as well
                children[parent] -= 1
        if self._checksums:
            deque(map(self._checksums.pop, blocks, repeat(None)), maxlen=0)
        if self.lossy:
            deque(map(self.lossy.pop, blocks, repeat(None)), maxlen=0)
        if self.anchors.keys().isdisjoint(blocks):
            return taken, []
        slots: list[int] = []
        anchors: list[Anchor] = []
        for block, slot in zip(blocks, taken, strict=True):
            anchor = self.anchors.pop(block, None)
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

    def victims(
        self,
        order: Iterator[BlockId],
        count: int,
        already: Sequence[BlockId] = (),
        may: Callable[[BlockId], bool] | None = None,
    ) -> list[BlockId]:
        """Up to `count` blocks to evict: again and again the first in `order` with neither pins nor children left.

        `already` were chosen before. `may` is asked of a block that could go, and one that it says no to stays: it must
        say no to those chosen already, and to no block that it would say yes to later.
        """
        anchors, children, parents = self.anchors, self._children, self._parents
        ahead = list(islice(order, count))
        chosen = ahead[: self._go_as_they_come(ahead)] if may is None and not already else []
        if len(chosen) == count:
            return chosen
        leaving = Counter(map(parents.__getitem__, [*already, *chosen]))
        passed: dict[BlockId, None] = {}
        for first in chain(ahead[len(chosen) :], order):
            block = first
            while (
                block not in anchors and children.get(block, 0) == leaving.get(block, 0) and (may is None or may(block))
            ):
                chosen.append(block)
                if len(chosen) == count:
                    return chosen
                parent = parents[block]
                if parent is None:
                    break
                leaving[parent] += 1
                if parent not in passed:
                    break
                block = parent  # its turn has been, it only had a child then: nothing comes before it
            else:
                passed[block] = None
        return chosen

    def _go_as_they_come(self, blocks: Sequence[BlockId]) -> int:
        """How many of `blocks`, from the first on, have nothing behind them but the block just before. Nearly always
        all, where an order keeps suffixes before prefixes, and that is seen at the speed of C."""
        if not self.anchors.keys().isdisjoint(blocks):
            return 0
        just_left = map(eq, map(self._parents.__getitem__, blocks), islice(blocks, 1, None))
        fine = list(map(eq, map(self._children.get, blocks, repeat(0)), chain((False,), just_left)))
        return fine.index(False) if False in fine else len(fine)

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
        for block in self.lossy:
            if block not in self.slots:
                raise IntegrityError(f"{name}: block {block} is lossy, and not here")
        if self._parents.keys() != self.slots.keys() or not self._children.keys() <= self.slots.keys():
            raise IntegrityError(f"{name}: something is remembered of blocks that are gone")
