"""Every eviction strategy again, too slow to be wrong: plain lists, sorted or walked as a whole at each question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Kept:
    """What is known of a resident block. `at` is when it last took a place in the order."""

    at: int
    depth: int
    uses: int = 1
    worth: int = 0
    parent: int | None = None
    bit: bool = False


@dataclass
class Model:
    """Blocks in the order of insertion; `order` says by what they are sorted."""

    kept: dict[int, Kept] = field(default_factory=dict[int, Kept])
    tick: int = 0
    asked: bool = False

    def next_tick(self) -> int:
        self.tick += 1
        return self.tick

    def on_insert(self, blocks: Sequence[int], parent: int | None) -> None:
        depth = 0 if parent is None else self.kept[parent].depth + 1
        for offset in reversed(range(len(blocks))):
            before = blocks[offset - 1] if offset else parent
            self.kept[blocks[offset]] = Kept(self.next_tick(), depth + offset, parent=before)

    def on_hit(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self.hit(self.kept[block])

    def hit(self, one: Kept) -> None: ...

    def on_remove(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self.kept[block]

    def victims(self) -> list[int]:
        self.asked = True
        return sorted(self.kept, key=lambda block: self.order(self.kept[block]))

    def order(self, one: Kept) -> Any:
        return one.at


class NaiveFIFO(Model):
    def on_extend(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self.kept[block].at = self.next_tick()


class NaiveLRU(NaiveFIFO):
    def hit(self, one: Kept) -> None:
        one.at = self.next_tick()


class NaiveLFU(NaiveFIFO):
    def hit(self, one: Kept) -> None:
        one.uses += 1
        one.at = self.next_tick()

    def order(self, one: Kept) -> Any:
        return one.uses, one.at


class NaiveLengthAware(Model):
    hit = NaiveLFU.hit

    def order(self, one: Kept) -> Any:
        return one.uses, -one.depth, one.at


class NaiveCostAware(Model):
    """`prices[depth]`: what a block costs there. No block is cheaper than the one before it."""

    clock = 0
    prices: Sequence[int] = (1,) * 99

    def on_insert(self, blocks: Sequence[int], parent: int | None) -> None:
        super().on_insert(blocks, parent)
        for block in blocks:
            self.kept[block].uses = 0
        self.on_hit(blocks)

    def on_hit(self, blocks: Sequence[int]) -> None:
        most = 0
        for block in reversed(blocks):
            one = self.kept[block]
            one.uses += 1
            most = max(most, one.worth, self.clock + one.uses * self.prices[one.depth])
            one.worth, one.at = most, self.next_tick()

    def on_extend(self, blocks: Sequence[int]) -> None:
        most = 0
        for block in reversed(blocks):
            one = self.kept[block]
            if one.worth < most:
                one.worth, one.at = most, self.next_tick()
            most = one.worth

    def on_remove(self, blocks: Sequence[int]) -> None:
        self.clock = max(self.clock, min((one.worth for one in self.kept.values()), default=0))
        super().on_remove(blocks)
        gone = set(blocks)
        lost: list[int] = []
        while found := [b for b, one in self.kept.items() if one.parent in gone and b not in gone]:
            gone |= set(found)
            lost += found
        for block in sorted(lost, key=lambda block: -self.kept[block].depth):
            self.kept[block].worth, self.kept[block].at = -1, self.next_tick()

    def order(self, one: Kept) -> Any:
        return one.worth, one.at


class NaiveSieve(Model):
    """The paper's queue, hand and bits, moved one step at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[int] = []
        self.hand = 0

    def on_insert(self, blocks: Sequence[int], parent: int | None) -> None:
        super().on_insert(blocks, parent)
        self.queue += reversed(blocks)

    def hit(self, one: Kept) -> None:
        one.bit = True

    def on_extend(self, blocks: Sequence[int]) -> None:
        ahead = [block for block in self.queue[self.hand :] if block in blocks and not self.kept[block].bit]
        self.queue = [block for block in self.queue if block not in ahead]
        self.queue += [block for block in reversed(blocks) if block in ahead]

    def on_remove(self, blocks: Sequence[int]) -> None:
        left = list(blocks) if self.asked else []
        while left:
            block = self.queue[self.hand]
            if not self.kept[block].bit and block in left:
                left.remove(block)
                del self.queue[self.hand]
            else:
                self.kept[block].bit = False
                self.hand += 1
            self.wrap()
        for block in blocks:
            if block in self.queue:
                self.hand -= self.queue.index(block) < self.hand
                self.queue.remove(block)
        self.wrap()
        self.asked = False
        super().on_remove(blocks)

    def wrap(self) -> None:
        if self.hand >= len(self.queue):
            self.hand = 0

    def victims(self) -> list[int]:
        self.asked = True
        round_ = self.queue[self.hand :] + self.queue[: self.hand]
        return sorted(round_, key=lambda block: self.kept[block].bit)


class NaiveS3FIFO(Model):
    """The paper's algorithm 1 on lists. What it would evict and the pool keeps goes to the end of main."""

    def __init__(self) -> None:
        super().__init__()
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: list[int] = []
        self.uses: dict[int, int] = {}

    def on_insert(self, blocks: Sequence[int], parent: int | None) -> None:
        super().on_insert(blocks, parent)
        for block in reversed(blocks):
            self.uses[block] = 0
            (self.main if block in self.ghosts else self.small).append(block)
            if block in self.ghosts:
                self.ghosts.remove(block)

    def on_hit(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.uses[block] = min(3, self.uses[block] + 1)

    def on_extend(self, blocks: Sequence[int]) -> None:
        again = [block for block in reversed(blocks) if block in self.small]
        self.small = [block for block in self.small if block not in again] + again

    def evict(self, small: list[int], main: list[int], uses: dict[int, int], moved: list[int]) -> int:
        """Algorithm 1's EVICT: takes one out, which is returned."""
        while True:
            if small and (len(small) >= 0.1 * (len(small) + len(main)) or not main):
                block = small.pop(0)
                if uses[block] <= 1:
                    return block
                uses[block] = 0
            else:
                block = main.pop(0)
                if uses[block] == 0:
                    return block
                uses[block] -= 1
            main.append(block)
            moved.append(block)

    def victims(self) -> list[int]:
        self.asked = True
        small, main, uses = list(self.small), list(self.main), dict(self.uses)
        return [self.evict(small, main, uses, []) for _ in range(len(small) + len(main))]

    def on_remove(self, blocks: Sequence[int]) -> None:
        if self.asked and blocks:
            small, main, uses = list(self.small), list(self.main), dict(self.uses)
            offered: list[int] = []
            moved: list[int] = []
            while not set(blocks) <= set(offered):
                offered.append(self.evict(small, main, uses, moved))
                if offered[-1] not in blocks:
                    moved.append(offered[-1])
                    uses[offered[-1]] = 0
            moved = [block for at, block in enumerate(moved) if block not in moved[at + 1 :]]
            self.small = [block for block in self.small if block not in moved]
            self.main = [block for block in self.main if block not in moved] + moved
            self.uses |= {block: uses[block] for block in moved}
            self.ghosts += [block for block in blocks if block in self.small]
            del self.ghosts[: max(0, len(self.ghosts) - 9 * len(self.kept) // 10)]
        self.asked = False
        for block in blocks:
            (self.small if block in self.small else self.main).remove(block)
            del self.uses[block]
        super().on_remove(blocks)
