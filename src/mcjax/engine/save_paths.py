"""What has to go down from a node's host memory to its SSD: queues of blocks, and the paths that are made of them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from mcjax.kvpool.holds import Pin
from mcjax.kvpool.pool import Pool
from mcjax.types import BlockId

NOBODY = -1
"""The owner of what is done on behalf of no request."""


@dataclass(slots=True, eq=False)
class Path:
    """Blocks to bring down, a run of one chain, behind `stands_on` (None at a start)."""

    stands_on: BlockId | None
    standing: Pin | None
    """Keeps that block below."""
    waiting: deque[BlockId]
    last: BlockId
    is_urgent: bool
    starved: bool = False
    """Whether it ends for want of the room that other paths have for now."""


class SavePaths:
    """Blocks wait here until there is a path for them; each is in one place at a time."""

    def __init__(self, above: Pool, below: Pool):
        self.open = 0
        """Paths under way."""
        self.busy: dict[BlockId, None] = {}
        """Their blocks."""
        self._above = above
        self._below = below
        self._urgent: OrderedDict[BlockId, None] = OrderedDict()
        self._wanted: OrderedDict[BlockId, None] = OrderedDict()
        self._aside: dict[BlockId, bool] = {}
        """What has to wait for a path under way to end, and whether it is urgent."""
        self._starved: dict[BlockId, bool] = {}
        """What found no room below while other paths were under way: what they hold may be evicted when they end."""
        self._later: deque[tuple[int, Sequence[BlockId]]] = deque()
        """What found none at all and shall go down all the same, and when that is tried again."""
        self._tails: dict[BlockId, Path] = {}
        """Paths under way, by their last blocks: what continues one joins it."""

    def __contains__(self, block: BlockId) -> bool:
        """Whether a block is to go down, or on its way."""
        return block in self._wanted or block in self.busy or block in self._aside or block in self._starved

    @property
    def waiting(self) -> bool:
        """Whether there is something to begin with."""
        return bool(self._urgent or self._wanted)

    @property
    def urgent(self) -> bool:
        """Whether somebody waits for what has not begun."""
        return bool(self._urgent)

    # Into the queues

    def want(self, blocks: Sequence[BlockId]) -> None:
        """These shall go down, when there is time."""
        self._wanted.update(dict.fromkeys(blocks))

    def ask(self, blocks: Sequence[BlockId]) -> None:
        """Somebody waits until these are below."""
        for block in blocks:
            # What is under way is nearer than any queue; what waits for that has its turn when it has ended.
            if not (block in self.busy or block in self._aside or block in self._starved):
                self._urgent[block] = None

    def want_at(self, when_ns: int, blocks: Sequence[BlockId]) -> None:
        """Want them again at a time; calls come in order of time."""
        self._later.append((when_ns, blocks))

    def starve(self, path: Path, blocks: Sequence[BlockId]) -> None:
        """What is left of `path` finds no room; it is tried again when another path has ended. There must be one."""
        path.starved = True
        self._starved.update(dict.fromkeys(blocks, path.is_urgent))

    def come_due(self, now_ns: int) -> int | None:
        """Want what is due; returns when the next is."""
        while self._later and self._later[0][0] <= now_ns:
            self.want(self._later.popleft()[1])
        return self._later[0][0] if self._later else None

    # Out of them

    def next(self) -> Path | None:
        """Begin the next path."""
        for queue in (self._urgent, self._wanted):
            while queue:
                block, _ = queue.popitem(last=False)
                run, stands_on = self._missing_before(block)
                if not run:
                    continue
                self._add_following(run, queue)
                is_urgent = queue is self._urgent
                if stands_on is None or stands_on not in self.busy:
                    return self._begin(stands_on, run, is_urgent)
                path = self._tails.get(stands_on)
                if path is None:
                    self._aside.update(dict.fromkeys(run, is_urgent))
                else:
                    self._extend(path, run)
        return None

    def _missing_before(self, block: BlockId) -> tuple[list[BlockId], BlockId | None]:
        """The run of blocks that ends with `block` and has to go down, and what it continues: below, or on its way."""
        above, below, busy = self._above, self._below, self.busy
        run: list[BlockId] = []
        at: BlockId | None = block
        while at is not None and at in above and at not in below and at not in busy:
            run.append(at)
            at = above.parent(at)
        return run[::-1], at

    def _add_following(self, run: list[BlockId], queue: OrderedDict[BlockId, None]) -> None:
        """What the queue has next is mostly what comes next in the chain."""
        above, below, busy = self._above, self._below, self.busy
        while queue:
            block = next(iter(queue))
            if block not in above or block in below or block in busy or above.parent(block) != run[-1]:
                return
            queue.popitem(last=False)
            run.append(block)

    def _begin(self, stands_on: BlockId | None, run: list[BlockId], is_urgent: bool) -> Path:
        standing = None if stands_on is None else self._below.stand_on(NOBODY, stands_on)
        path = Path(stands_on, standing, deque(run), run[-1], is_urgent)
        self._tails[path.last] = path
        self.busy.update(dict.fromkeys(run))
        self.open += 1
        return path

    def _extend(self, path: Path, run: list[BlockId]) -> None:
        del self._tails[path.last]
        path.waiting.extend(run)
        path.last = run[-1]
        self._tails[path.last] = path
        self.busy.update(dict.fromkeys(run))

    def close(self, path: Path) -> None:
        """The path is about to end: nothing joins it any more."""
        self._tails.pop(path.last, None)

    def end(self, path: Path) -> None:
        """The path has ended; what waited for that has its turn."""
        self.close(path)
        for block in path.waiting:
            self.busy.pop(block, None)
        self._again(self._aside)
        if not path.starved:
            self._again(self._starved)
        self.open -= 1

    def _again(self, blocks: dict[BlockId, bool]) -> None:
        for block, is_urgent in blocks.items():
            (self._urgent if is_urgent else self._wanted)[block] = None
        blocks.clear()
