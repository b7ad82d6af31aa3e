"""A pool: which blocks are resident in one tier of one node, who holds them, and who must go.

A node has a pool for each of its tiers, and each holds whole prefixes. A pool decides *within* its tier: it may refuse
(`PoolFull`), and never moves a request elsewhere. It does no I/O: callers move bytes between the regions it hands out,
and then commit. Every method is synchronous, so each is atomic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mcjax import aio
from mcjax.errors import IntegrityError
from mcjax.kvpool.audit import check_blocks, check_pins
from mcjax.kvpool.base import BlockStore, Eviction, Watermark
from mcjax.kvpool.gone import Gone
from mcjax.kvpool.holds import Anchor, Hold, Pin, Reservation
from mcjax.kvpool.residents import Residents
from mcjax.kvpool.room import Room
from mcjax.types import BlockId, KVGroup, Miss, NullRecorder, Recorder


class Pool(Residents):
    """Blocks of one tier of a node: its host memory, its SSD, or an instance's device pages.

    What is in it can be asked by the methods of `Residents`. Two requests that write the same block both write; the
    second commit keeps the first's slot.
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
        gone: Gone | None = None,
    ):
        super().__init__(node, store, groups)
        self.lease_ns = lease_ns
        self.space = aio.WaitQueue(f"{node}.space")
        store.on_space = self._notify
        self._eviction = eviction
        self._extended: Callable[[Sequence[BlockId]], None] | None = getattr(eviction, "on_extend", None)
        self._recorder = recorder
        self._heard = type(recorder) is not NullRecorder
        self._on_change = on_change
        self.gone = Gone() if gone is None else gone
        """What this pool, and those it shares the memory with, had and lost."""
        self.gone.widen(store.capacity)
        self.room = Room(node, store, self._index, eviction, watermark, self._held_by_tenants)
        self._detached: dict[Anchor, None] = {}
        self._pins: dict[Pin, None] = {}
        self._reservations: dict[Reservation, None] = {}
        self._lent = 0
        self._notified = False
        self._recover()

    # Holding

    @property
    def held(self) -> int:
        """Pins and reservations that somebody holds."""
        return len(self._pins) + len(self._reservations)

    def pin(self, owner: int, blocks: Sequence[BlockId], leased: bool = False, accepts_lossy: bool = True) -> Pin:
        """Match and pin at once: the longest resident prefix of `blocks`, which stays until the pin is released."""
        count = self.match(blocks, accepts_lossy)
        pin = Pin(self.node, owner, self._expiry(leased), blocks=tuple(blocks[:count]), accepts_lossy=accepts_lossy)
        if count:
            pin.deepest = self._index.anchor(blocks[count - 1])
            self._eviction.on_hit(pin.blocks)
            if self.room.saver is not None:
                self.room.saver.on_hit(pin.blocks)
            self._note("hit", owner, pin.blocks)
        self._pins[pin] = None
        return pin

    def deepen(self, pin: Pin, blocks: Sequence[BlockId]) -> None:
        """Let `pin` also cover blocks that were committed behind it; `blocks` is the whole chain from the start."""
        pin.check()
        self._check_up()
        count = self._leading(blocks, pin.accepts_lossy)
        if count <= len(pin.blocks):
            return
        before = pin.deepest
        pin.blocks = tuple(blocks[:count])
        pin.deepest = self._index.anchor(blocks[count - 1])
        if self._extended is not None:
            self._extended(pin.blocks)
        if before is not None:
            self._unpin(before)

    def narrow(self, pin: Pin, count: int) -> None:
        """Let `pin` cover no more than its first `count` blocks. Raises `StaleRegion` if those have left the index."""
        pin.check()
        self._check_up()
        before, kept = pin.deepest, pin.blocks[:count]
        if kept == pin.blocks:
            return
        if kept and kept[-1] not in self._index.slots:
            raise self._left(KeyError(kept[-1]))
        pin.blocks = kept
        pin.deepest = self._index.anchor(kept[-1]) if kept else None
        if before is not None:
            self._unpin(before)

    def note_hits(self, share: float) -> None:
        """A request found this share of its prompt here; watermark strategies look at the history."""
        self.room.note_hits(share)

    def stand_on(self, owner: int, block: BlockId) -> Pin:
        """Keep a resident block, and all it continues, for what is about to continue it. That is no hit: nothing gets
        more recent. Raises `StaleRegion` like `chain`."""
        self._check_up()
        if block not in self._index.slots:
            raise self._left(KeyError(block))
        pin = Pin(self.node, owner, blocks=(block,), deepest=self._index.anchor(block))
        self._pins[pin] = None
        return pin

    # Writing

    def reserve(self, owner: int, count: int, leased: bool = False, tenant: str = "") -> Reservation:
        """Slots for `count` blocks of `tenant`, evicting if need be. Raises `PoolFull` and takes nothing if there is no
        room."""
        self._check_up()
        self._make_room(count, owner, tenant)
        reservation = Reservation(
            self.node, owner, self._expiry(leased), tenant=tenant, slots=self.store.reserve(count)
        )
        self._reservations[reservation] = None
        if self.room.shares is not None:
            self.room.shares.take(tenant, count)
        return reservation

    def commit(
        self,
        reservation: Reservation,
        blocks: Sequence[BlockId],
        parent: BlockId | None,
        checksums: Sequence[bytes] = (),
        lossy: bool = False,
    ) -> list[int] | None:
        """Make `blocks` visible: they fill the reservation's next slots and follow `parent` (None at the start).

        `checksums` are of the bytes in those slots. `lossy`: their numbers are rounded, or computed from such; so they
        are, too, behind a lossy parent and in a store that rounds.

        Returns the slots in which the blocks lie now: those of an equal block, where that was here first, unless that
        is lossy and the new one is not. None when the parent is no longer resident: the blocks could never be matched,
        so their slots are given back.
        """
        self._check_up()
        reservation.check()
        slots = reservation.slots[: len(blocks)]
        if len(slots) < len(blocks):
            raise IntegrityError(f"{self.node}: {len(blocks)} blocks for the {len(slots)} slots that are left reserved")
        del reservation.slots[: len(blocks)]
        return self._commit(reservation.owner, reservation.tenant, slots, blocks, parent, checksums, lossy)

    def lend(self, owner: int, count: int, tenant: str = "") -> list[int]:
        """Slots that hold no block, for as long as their owner likes: the pages that a request computes in. Evicts if
        need be. Raises `PoolFull` like `reserve`. Each comes back by `take_back`, or becomes a block by `keep`."""
        self._check_up()
        self._make_room(count, owner, tenant)
        self._lent += count
        slots = self.store.reserve(count)
        if self.room.shares is not None:
            self.room.shares.lend(tenant, slots)
        return slots

    def take_back(self, slots: Sequence[int]) -> None:
        """Lent slots are free again."""
        self._lent -= len(slots)
        if self.room.shares is not None:
            self.room.shares.returned(slots)
        self.store.free(slots)
        self._notify()

    def keep(
        self,
        owner: int,
        slots: Sequence[int],
        blocks: Sequence[BlockId],
        parent: BlockId | None,
        checksums: Sequence[bytes] = (),
        tenant: str = "",
        lossy: bool = False,
    ) -> list[int] | None:
        """Lent slots become resident blocks, like `commit`: their owner has done with them, but for what it pins."""
        self._check_up()
        self._lent -= len(slots)
        if self.room.shares is not None:
            self.room.shares.kept(slots, tenant)
        return self._commit(owner, tenant, list(slots), blocks, parent, checksums, lossy)

    def _commit(
        self,
        owner: int,
        tenant: str,
        slots: list[int],
        blocks: Sequence[BlockId],
        parent: BlockId | None,
        checksums: Sequence[bytes],
        lossy: bool,
    ) -> list[int] | None:
        shares = self.room.shares
        if parent is not None and parent not in self._index.slots:
            self.store.free(slots)
            if shares is not None:
                shares.give_back(tenant, len(slots))
            self._notify()
            return None
        lossy = lossy or self.store.lossy or parent in self._index.lossy
        if self._index.lossy and not lossy:
            self._refine(blocks, slots, checksums)
        new, new_slots, duplicates = self._index.insert(blocks, slots, parent, checksums[: len(blocks)])
        if lossy:
            self._index.lossy.update(dict.fromkeys(new))
        if duplicates:
            self.store.free(duplicates)
            if shares is not None:
                shares.give_back(tenant, len(duplicates))
            self._notify()
        if shares is not None:
            shares.own(new, tenant)
        if new:
            for span in self._index.runs(new) if duplicates else (new,):
                before = self._index.parent(span[0])
                places = self._index.slots_of(span) if duplicates else new_slots
                self.store.commit(places, span, self._index.checksums_of(span), before)
                self._note("insert", owner, span)
                if self.room.saver is not None:
                    self.room.saver.on_insert(span, before)
            self._eviction.on_insert(new, parent)
            self._on_change(1, new)
        return self._index.slots_of(blocks) if duplicates else slots

    def _refine(self, blocks: Sequence[BlockId], slots: list[int], checksums: Sequence[bytes]) -> None:
        """What was lossy is exact from now on. Whoever is reading the old bytes finds its region stale."""
        refined = self._index.refine(blocks, slots, checksums)
        for span in self._index.runs(refined) if refined else ():
            places, sums = self._index.slots_of(span), self._index.checksums_of(span)
            self.store.commit(places, span, sums, self._index.parent(span[0]))

    def _recover(self) -> None:
        """Take over what a persistent store was opened with; what has lost its prefix is of no use."""
        found = self.store.recovered()
        useless: list[int] = []
        for one in found:
            if one.block in self._index.slots or (one.parent is not None and one.parent not in self._index.slots):
                useless.append(one.slot)
                continue
            self._index.insert((one.block,), (one.slot,), one.parent, (one.checksum,))
            self._eviction.on_insert((one.block,), one.parent)
        if self.store.lossy:
            self._index.lossy.update(dict.fromkeys(self._index.slots))
        self.store.free(useless)
        if len(self._index):
            self._on_change(1, tuple(self._index.slots))

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
            if self.room.shares is not None:
                self.room.shares.give_back(hold.tenant, len(hold.slots))
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
            self.gone.note(doomed[::-1], Miss.FAULT)
            self._on_change(-1, doomed)
            self._notify()

    def shed(self, blocks: Sequence[BlockId], owner: int = -1) -> Sequence[BlockId]:
        """Of a run of one chain, let those go, from the end, that nothing pins and nothing continues: they are in the
        tier above now. Returns which went, the last one first."""
        going: list[BlockId] = []
        for block in reversed(blocks):
            if block not in self._index.slots or block in self._index.anchors:
                break
            if self._index.children(block) != (1 if going else 0):
                break
            going.append(block)
        if going:
            self._note("shed", owner, going[::-1])
            self._remove(going)
            self._on_change(-1, going)
            self._notify()
        return going

    def fail(self) -> None:
        """The node died: its memory is gone, and everyone who asks is told."""
        self._down = True
        self.store.wipe()
        lost = list(reversed(self._index.slots))
        self._remove(lost)
        self.gone.note(lost, Miss.FAULT)
        self._notify()
        for hold in [*self._pins, *self._reservations]:
            hold.lost = True

    def wake(self) -> None:
        """What may leave has changed for a reason that is not this pool's: let waiters try again."""
        self._notify()

    # Inside

    def _notify(self) -> None:
        """Let waiters try again, once the caller has done all it does in this instant."""
        if len(self.space) and not self._notified:
            self._notified = True
            aio.clock().call_soon(self._try_again)

    def _try_again(self) -> None:
        self._notified = False
        self.space.notify()

    def _held_by_tenants(self) -> list[tuple[str, int]]:
        return [*((reservation.tenant, len(reservation)) for reservation in self._reservations), ("", self._lent)]

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
        if self.room.shares is not None:
            self.room.shares.left(blocks)
        if self.room.saver is not None:
            self.room.saver.on_remove(blocks)
        self._detached.update(dict.fromkeys(anchors))
        self.store.free(slots)

    def _make_room(self, count: int, owner: int, tenant: str) -> None:
        while victims := self.room.leaving(count, tenant):
            if self._heard:
                for span in self._index.runs(victims[::-1]):
                    self._note("evict", owner, span)
            self._remove(victims)
            self.gone.note(victims, Miss.EVICTED)
            self._on_change(-1, victims)
            # Less is free than hoped for where a transfer still reads a victim: then more must go.
        self.room.reading.asked += count

    def _note(self, kind: str, owner: int, span: Sequence[BlockId]) -> None:
        """A row of the log. `owner` is the request on whose behalf it happens: of an eviction, who needs the room."""
        if not self._heard:
            return
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
        check_blocks(self.node, self.store, self._index)
        check_pins(self.node, self._index, self._pins, self._detached)
        held = [(reservation.tenant, len(reservation)) for reservation in self._reservations]
        accounted = len(self) + len(self._detached) + sum(count for _, count in held) + self._lent
        if accounted != self.store.taken_slots:
            raise IntegrityError(f"{self.node}: {self.store.taken_slots} slots are taken, {accounted} accounted for")
        if self.room.shares is not None:
            self.room.shares.check_integrity(self.node, self._index.slots, held, self._lent)

    def check_idle(self) -> None:
        """Raise `IntegrityError` unless nobody holds anything: no pins, leases, reservations or transfers."""
        held = [*self._pins, *self._reservations]
        if held:
            owners = [hold.owner for hold in held][:5]
            raise IntegrityError(f"{self.node}: {len(held)} holds are left, of requests {owners}")
        if self._lent:
            raise IntegrityError(f"{self.node}: {self._lent} lent slots have not come back")
        self.store.check_idle()
