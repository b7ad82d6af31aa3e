"""Device pages of one instance: what a request takes of them, and the device tier, the blocks that stay in them.

A request's pages are its own, but for the first ones where they hold blocks that others may read as well: those it pins
and nobody writes into. What it has of its own, and has filled, it may leave behind as blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mcjax import aio
from mcjax.errors import PoolFull
from mcjax.kvpool.base import BlockStore
from mcjax.kvpool.holds import Pin
from mcjax.kvpool.pool import Pool
from mcjax.types import BlockId


@dataclass(slots=True, eq=False)
class Held:
    """What a request has of an instance's pages, in order of position."""

    owner: int
    pages: list[int]
    shared: int = 0
    """So many of the first pages are blocks of the device tier. They are read in place, and never written into."""
    pin: Pin | None = None
    """Keeps those blocks, and for a moment one more, which is to be copied. None where there are none."""
    chain: Sequence[BlockId] = ()
    """What the pin keeps from leaving."""
    cached: int = 0
    """Blocks of its prompt that were here when it came."""
    taken_ns: int = -1
    """When it was had."""
    lossy: bool = False
    """Whether any of the blocks that it found here is lossy."""

    @property
    def own(self) -> list[int]:
        return self.pages[self.shared :]

    def share(self, again: Held) -> None:
        """Hold what `again` reads in place; what that has of its own is somebody else's to give back."""
        self.pages, self.shared = again.pages[: again.shared], again.shared
        self.pin, self.chain = again.pin, again.chain


class Pages:
    """As many pages at once as a request needs to begin, in order of arrival; then one by one.

    With `caches`, blocks stay in pages that nobody needs: a take succeeds whenever what is free and what nobody pins
    are enough. Who waits pins nothing meanwhile, so those who wait never wait for each other.

    `on_space` hears of free pages before those who wait to begin.
    """

    def __init__(self, pool: Pool, caches: bool = False):
        self.pool = pool
        self.store: BlockStore = pool.store
        self.caches = caches
        self.on_space: Callable[[], None] = lambda: None
        self._pinned: dict[BlockId, int] = {}
        """Of each block that is kept from leaving, how many keep it."""
        pool.store.on_space = self._space

    @property
    def available(self) -> int:
        """Pages that are free, or hold blocks that nobody needs just now."""
        return self.store.free_slots + len(self.pool) - len(self._pinned)

    def match(self, blocks: Sequence[BlockId], accepts_lossy: bool = True) -> int:
        """How many leading blocks are here now; they may have gone by the time that `take` looks."""
        return self.pool.match(blocks, accepts_lossy) if self.caches else 0

    # Taking

    async def take(
        self, owner: int, count: int, blocks: Sequence[BlockId] = (), most: int = 0, accepts_lossy: bool = True
    ) -> Held:
        """Wait for `count` pages. The caller has made sure that the instance has so many at all.

        Of the prefix `blocks`, what is here is pinned as the pages are taken, and up to `most` blocks of it are read in
        place. Where one more is here (`Held.cached`), it is to be copied into the first page of the request's own;
        after that, `copied` is called.
        """
        found: list[Held] = []

        def attempt() -> bool:
            held = self._attempt(owner, count, blocks, most, accepts_lossy)
            if held is not None:
                found.append(held)
            return held is not None

        try:
            await self.pool.space.until(attempt)
        except BaseException:
            for held in found:  # granted, and cancelled before it could be used
                self.release(held)
            raise
        return found[0]

    def _attempt(
        self, owner: int, count: int, blocks: Sequence[BlockId], most: int, accepts_lossy: bool
    ) -> Held | None:
        pool = self.pool
        # A block to be copied takes a page more until it is; where there is none, it is loaded or computed.
        for cached in dict.fromkeys((self.match(blocks, accepts_lossy), self.match(blocks[:most], accepts_lossy))):
            shared = min(cached, most)
            chain = pool.chain(blocks[cached - 1]) if cached else ()
            if count - shared > self.available - len([block for block in chain if block not in self._pinned]):
                continue
            held = Held(owner, [], cached=cached, taken_ns=aio.now_ns())
            if cached:
                held.pin = pool.pin(owner, blocks[:cached], accepts_lossy=accepts_lossy)
                held.lossy = pool.is_lossy(held.pin.blocks)
                self._follow(held)
            try:
                own = pool.lend(owner, count - shared)
            except PoolFull:  # a page that would come free is still read by a transfer
                self._unpin(held)
                continue
            held.pages = [*pool.region(blocks[:shared]).slots, *own] if shared else own
            held.shared = shared
            return held
        return None

    def more(self, owner: int, count: int) -> list[int]:
        """`count` pages now, for somebody who is at work; none if there are fewer."""
        if self.available >= count:
            try:
                return self.pool.lend(owner, count)
            except PoolFull:  # see `_attempt`
                pass
        return []

    def copied(self, held: Held) -> None:
        """The block behind those that are read in place has been copied: the request needs it no more."""
        assert held.pin is not None
        self.pool.narrow(held.pin, held.shared)
        self._follow(held)
        self._space()

    # Letting go

    def keep(self, held: Held, blocks: Sequence[BlockId], lossy: bool = False) -> None:
        """The first pages hold `blocks`, complete, and nobody will write into them: they become blocks that others may
        find. The request goes on reading them; where one was here before, it reads that one from now on. `lossy`: the
        request has read rounded blocks."""
        first, count = held.shared, len(blocks)
        if not self.caches or count <= first or not self._continues(blocks, first, lossy):
            return
        parent = blocks[first - 1] if first else None
        slots = self.pool.keep(held.owner, held.pages[first:count], blocks[first:], parent, lossy=lossy)
        assert slots is not None  # or what it continues had not been there
        held.pages[first:count] = slots
        held.shared = count
        if held.pin is None:
            held.pin = self.pool.pin(held.owner, ())
        self.pool.deepen(held.pin, blocks)
        self._follow(held)
        self._space()

    def give_back(
        self,
        pages: Sequence[int],
        owner: int = -1,
        blocks: Sequence[BlockId] = (),
        first: int = 0,
        lossy: bool = False,
    ) -> None:
        """Pages of a request's own are free, but for those that hold blocks `first` and following of the chain
        `blocks`: they stay, for whoever comes."""
        kept = len(blocks) - first
        if self.caches and kept > 0 and self._continues(blocks, first, lossy):
            parent = blocks[first - 1] if first else None
            self.pool.keep(owner, pages[:kept], blocks[first:], parent, lossy=lossy)
            pages = pages[kept:]
        self.pool.take_back(pages)
        self._space()

    def release(self, held: Held) -> None:
        """The request has done with all that it holds; harmless if it has before."""
        own, held.pages = held.own, []
        self._unpin(held)
        self.pool.take_back(own)
        self._space()

    def fail(self) -> None:
        """The device is gone, with all that lay in its pages."""
        self.caches = False
        self.pool.fail()

    # Inside

    def _continues(self, blocks: Sequence[BlockId], first: int, lossy: bool) -> bool:
        """Whether blocks from `first` on can be left here: what comes before them is here too, and no exact one would
        take a lossy one's place, which others may be reading where it is."""
        return (not first or blocks[first - 1] in self.pool) and (lossy or not self.pool.is_lossy(blocks))

    def _unpin(self, held: Held) -> None:
        if held.pin is not None:
            self.pool.release(held.pin)
            held.pin, held.shared = None, 0
            self._follow(held)

    def _follow(self, held: Held) -> None:
        """Count what `held` keeps from leaving, now that its pin has changed."""
        pinned, before = self._pinned, held.chain
        deepest = None if held.pin is None else held.pin.deepest
        held.chain = () if deepest is None else self.pool.chain(deepest.block)
        for block in held.chain:
            pinned[block] = pinned.get(block, 0) + 1
        for block in before:
            pinned[block] -= 1
            if not pinned[block]:
                del pinned[block]

    def _space(self) -> None:
        self.on_space()
        self.pool.space.notify()

    # Checking

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless pages, blocks and pins add up. For tests: O(pages)."""
        self.pool.check_integrity()

    def check_idle(self) -> None:
        """Raise `IntegrityError` unless nobody holds a page: no request, and no transfer."""
        self.pool.check_idle()
