"""One node's pool: which blocks are resident, who holds them, and who must go.

The pool decides *within* a node. It may refuse (`PoolFull`); it never moves a request elsewhere. It does no I/O:
callers move bytes between the regions it hands out, and then commit. Every method is synchronous, so each is atomic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from mcjax import aio
from mcjax.errors import InstanceDown, IntegrityError, PoolFull, StaleRegion
from mcjax.kvpool.base import BlockStore, Eviction, Watermark
from mcjax.kvpool.groups import boundary
from mcjax.kvpool.holds import Anchor, Hold, Pin, Reservation
from mcjax.kvpool.index import BlockIndex
from mcjax.transfer.base import Region
from mcjax.types import BlockId, KVGroup, Recorder

HIT_HISTORY = 256


class Pool:
    """Blocks of one node's DRAM.

    The index holds committed blocks only. Two requests that write the same block both write; the second commit keeps
    the first's slot.
    """

    def __init__(
        self,
        node: str,
        store: BlockStore,
        eviction: Eviction,
        watermark: Watermark,
        recorder: Recorder,
        lease_ns: int,
        on_change: Callable[[int, Sequence[BlockId]], None] = lambda sign, blocks: None,
        groups: Sequence[KVGroup] = (KVGroup(),),
    ):
        self.node = node
        self.store = store
        self.lease_ns = lease_ns
        self.space = aio.WaitQueue(f"{node}.space")
        store.on_space = self._notify
        self._eviction = eviction
        self._watermark = watermark
        self._recorder = recorder
        self._on_change = on_change
        self._boundary = boundary(groups)
        self._index = BlockIndex()
        self._detached: dict[Anchor, None] = {}
        self._pins: dict[Pin, None] = {}
        self._reservations: dict[Reservation, None] = {}
        self._hits: deque[float] = deque(maxlen=HIT_HISTORY)
        self._down = False
        self._notified = False

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._index.slots

    def _check_up(self) -> None:
        if self._down:
            raise InstanceDown(self.node)

    # Reading

    @property
    def held(self) -> int:
        """Pins and reservations that somebody holds."""
        return len(self._pins) + len(self._reservations)

    def match(self, blocks: Sequence[BlockId]) -> int:
        """How many leading blocks could be used now, up to a boundary of all KV groups. Says nothing about later, and
        keeps nothing alive; `pin` does.
        """
        self._check_up()
        count = self._index.leading(blocks)
        # A slot holds a block's every group, so one residency stands for them all (`groups.common_prefix`).
        return count - count % self._boundary

    def pin(self, owner: int, blocks: Sequence[BlockId], leased: bool = False) -> Pin:
        """Match and pin at once: the longest resident prefix of `blocks`, which stays until the pin is released."""
        count = self.match(blocks)
        pin = Pin(self.node, owner, self._expiry(leased), blocks=tuple(blocks[:count]))
        if count:
            pin.deepest = self._index.anchor(blocks[count - 1])
            self._eviction.on_hit(pin.blocks)
            self._note("hit", owner, pin.blocks)
        self._pins[pin] = None
        return pin

    def deepen(self, pin: Pin, blocks: Sequence[BlockId]) -> None:
        """Let `pin` also cover blocks that were committed behind it; `blocks` is the whole chain from the start."""
        pin.check()
        self._check_up()
        count = self._index.leading(blocks)
        if count <= len(pin.blocks):
            return
        before = pin.deepest
        pin.blocks = tuple(blocks[:count])
        pin.deepest = self._index.anchor(blocks[count - 1])
        self._eviction.on_hit(pin.blocks)  # or its head would look older than its tail
        if before is not None:
            self._unpin(before)

    def region(self, blocks: Sequence[BlockId]) -> Region:
        """Where resident blocks lie. Valid as long as the caller's pin; it goes stale with the slots.

        Raises `StaleRegion` if one has left the index: even pinned blocks do when they are found corrupt.
        """
        self._check_up()
        try:
            return self.store.regions(self._index.slots_of(blocks))
        except KeyError as missing:
            raise self._left(missing) from None

    def checksums(self, blocks: Sequence[BlockId]) -> tuple[bytes, ...]:
        """The checksums that blocks were committed with. Raises `StaleRegion` like `region`."""
        try:
            return self._index.checksums_of(blocks)
        except KeyError as missing:
            raise self._left(missing) from None

    def _left(self, missing: KeyError) -> StaleRegion:
        return StaleRegion(f"pool {self.node}: the block has left the index", first_block=missing.args[0])

    def contents(self) -> dict[BlockId, bytes]:
        """Every resident block and its checksum."""
        blocks = tuple(self._index.slots)
        return dict(zip(blocks, self._index.checksums_of(blocks), strict=True))

    def note_hits(self, share: float) -> None:
        """A request found this share of its prompt here; watermark strategies look at the history."""
        self._hits.append(share)

    # Writing

    def reserve(self, owner: int, count: int, leased: bool = False) -> Reservation:
        """Slots for `count` blocks, evicting if need be. Raises `PoolFull` and takes nothing if there is no room."""
        self._check_up()
        self._make_room(count, owner)
        reservation = Reservation(self.node, owner, self._expiry(leased), slots=self.store.reserve(count))
        self._reservations[reservation] = None
        return reservation

    def commit(
        self,
        reservation: Reservation,
        blocks: Sequence[BlockId],
        parent: BlockId | None,
        checksums: Sequence[bytes] = (),
    ) -> list[int] | None:
        """Make `blocks` visible: they fill the reservation's next slots and follow `parent` (None at the start).

        Returns the slots in which the blocks lie now: those of an equal block, where that was here first. None when the
        parent is no longer resident: the blocks could never be matched, so their slots are given back.
        """
        self._check_up()
        reservation.check()
        slots = reservation.slots[: len(blocks)]
        if len(slots) < len(blocks):
            raise IntegrityError(f"{self.node}: {len(blocks)} blocks for the {len(slots)} slots that are left reserved")
        del reservation.slots[: len(blocks)]
        if parent is not None and parent not in self._index.slots:
            self.store.free(slots)
            self._notify()
            return None
        new, new_slots, duplicates = self._index.insert(blocks, slots, parent, checksums[: len(blocks)])
        if duplicates:
            self.store.free(duplicates)
            self._notify()
        if new:
            self.store.commit(new_slots, new, self._index.checksums_of(new))
            self._eviction.on_insert(new, parent)
            self._on_change(1, new)
            for span in self._index.runs(new) if duplicates else (new,):
                self._note("insert", reservation.owner, span)
        return self._index.slots_of(blocks) if duplicates else slots

    # Letting go

    def release(self, hold: Hold) -> None:
        """Give a hold back; harmless if it is gone already."""
        if hold.released:
            return
        hold.released = True
        if isinstance(hold, Pin):
            self._pins.pop(hold, None)
            if hold.deepest is not None:
                self._unpin(hold.deepest)
        elif isinstance(hold, Reservation):
            self._reservations.pop(hold, None)
            self.store.free(hold.slots)
            hold.slots = []
        self._notify()

    def renew(self, hold: Hold) -> None:
        """A heartbeat for a lease. Raises `LeaseLost` if it came too late."""
        self._check_up()
        hold.check()
        if hold.expires_ns is not None:
            hold.expires_ns = aio.now_ns() + self.lease_ns

    def adopt(self, hold: Hold) -> None:
        """The hold's owner is on this node from now on: it no longer needs a heartbeat."""
        hold.check()
        hold.expires_ns = None

    def expire(self) -> None:
        """Take back every lease whose heartbeat is overdue."""
        now_ns = aio.now_ns()
        overdue = [hold for hold in self._leases() if hold.expires_ns is not None and hold.expires_ns <= now_ns]
        for hold in overdue:
            hold.lost = True
            self.release(hold)
            self._note("lease_lost", hold.owner, hold.blocks if isinstance(hold, Pin) else ())

    def next_expiry_ns(self) -> int | None:
        return min((hold.expires_ns for hold in self._leases() if hold.expires_ns is not None), default=None)

    def drop(self, blocks: Sequence[BlockId], owner: int = -1) -> None:
        """Blocks that are not what they say (corrupt or lost) leave the index at once, with all that continues them."""
        doomed = self._index.continued_by(blocks)
        if doomed:
            for span in self._index.runs(doomed):
                self._note("drop", owner, span)
            self._remove(doomed[::-1])
            self._on_change(-1, doomed)
            self._notify()

    def fail(self) -> None:
        """The node died: its memory is gone, and everyone who asks is told."""
        self._down = True
        self.store.wipe()
        self._remove(list(reversed(self._index.slots)))
        self._notify()
        for hold in [*self._pins, *self._reservations]:
            hold.lost = True

    # Inside

    def _notify(self) -> None:
        """Let waiters try again, once the caller has done all it does in this instant."""
        if len(self.space) and not self._notified:
            self._notified = True
            aio.clock().call_soon(self._try_again)

    def _try_again(self) -> None:
        self._notified = False
        self.space.notify()

    def _expiry(self, leased: bool) -> int | None:
        return aio.now_ns() + self.lease_ns if leased else None

    def _leases(self) -> list[Hold]:
        return [hold for hold in [*self._pins, *self._reservations] if hold.expires_ns is not None]

    def _unpin(self, anchor: Anchor) -> None:
        anchor.pins -= 1
        if anchor.pins:
            return
        if anchor.detached:
            del self._detached[anchor]
            self.store.free([anchor.slot])
        else:
            del self._index.anchors[anchor.block]

    def _remove(self, blocks: Sequence[BlockId]) -> None:
        """Take blocks out of the index, children before their parents. Pinned ones keep their slots until unpinned."""
        slots, anchors = self._index.remove(blocks)
        self._eviction.on_remove(blocks)
        self._detached.update(dict.fromkeys(anchors))
        self.store.free(slots)

    def _make_room(self, count: int, owner: int) -> None:
        capacity, free = self.store.capacity, self.store.free_slots
        low, high = self._watermark.levels(self._hits)
        if capacity - free + count <= high * capacity:
            return
        wanted = max(count, capacity - int(low * capacity) + count) if low < 1.0 else count
        while free < wanted:
            victims = self._index.victims(self._eviction.victims(), wanted - free)
            if free + len(victims) < count:
                raise PoolFull(self.node, count, free + len(victims))
            if not victims:
                return
            for span in self._index.runs(victims[::-1]):
                self._note("evict", owner, span)
            self._remove(victims)
            self._on_change(-1, victims)
            free = self.store.free_slots  # less than hoped for where a transfer still reads a victim: then more must go

    def _note(self, kind: str, owner: int, span: Sequence[BlockId]) -> None:
        """A row of the log. `owner` is the request on whose behalf it happens: of an eviction, who needs the room."""
        count, store = len(span), self.store
        self._recorder.event(
            aio.now_ns(),
            kind,
            owner,
            self.node,
            tier=store.tier,
            first_block=span[0] if count else -1,
            blocks=count,
            nbytes=count * store.block_bytes,
        )

    # Checking

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless slots, parents, children and pins all add up. For tests: O(blocks)."""
        self.store.check_integrity()
        index = self._index
        index.check_integrity(self.node)
        for block, slot in index.slots.items():
            header = self.store.header(slot)
            if header is None or header.block != block:
                raise IntegrityError(f"{self.node}: slot {slot} does not hold block {block}")
        pins: dict[Anchor, int] = {}
        for pin in self._pins:
            if pin.deepest is not None:
                pins[pin.deepest] = pins.get(pin.deepest, 0) + 1
        anchors = [*index.anchors.values(), *self._detached]
        if {anchor: anchor.pins for anchor in anchors} != pins:
            raise IntegrityError(f"{self.node}: pins are miscounted")
        for block, anchor in index.anchors.items():
            if anchor.detached or index.slots.get(block) != anchor.slot:
                raise IntegrityError(f"{self.node}: the anchor of block {block} is not where the block is")
        reserved = sum(len(reservation) for reservation in self._reservations)
        accounted = len(index) + len(self._detached) + reserved
        if accounted != self.store.taken_slots:
            raise IntegrityError(f"{self.node}: {self.store.taken_slots} slots are taken, {accounted} accounted for")

    def check_idle(self) -> None:
        """Raise `IntegrityError` unless nobody holds anything: no pins, leases, reservations or transfers."""
        held = [*self._pins, *self._reservations]
        if held:
            owners = [hold.owner for hold in held][:5]
            raise IntegrityError(f"{self.node}: {len(held)} holds are left, of requests {owners}")
        self.store.check_idle()
