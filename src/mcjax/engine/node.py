"""A node: the host that an instance runs on, with its pools, its way to move bytes, and its heartbeat."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from mcjax import aio
from mcjax.errors import InstanceDown, LeaseLost, PoolFull, RequestTooLarge
from mcjax.kvpool.holds import Hold, Pin, Reservation
from mcjax.kvpool.pool import Pool
from mcjax.transfer.base import Copy, CopyResult
from mcjax.transfer.engine import TransferEngine
from mcjax.types import NS_PER_S, Tier

SAVED_NS = 5 * NS_PER_S
"""How long to wait for what is being saved, where it is also possible to do without."""

if TYPE_CHECKING:
    from mcjax.engine.promotion import Promotion


class Node:
    """One pool node. It keeps what it holds on *other* nodes alive by heartbeat, and expires what others hold here."""

    def __init__(self, name: str, pool: Pool, engine: TransferEngine, wait_ns: int, ssd: Pool | None = None):
        self.name = name
        self.domain = name
        """What it fails together with: itself alone, or a rack of them."""
        self.pool = pool
        """Of its host memory: what other nodes read and write."""
        self.ssd = ssd
        """Of its SSD, if it has one: what left the host memory goes there, and comes back from there."""
        self.promotion: Promotion | None = None
        """What brings blocks up from there."""
        self.engine = engine
        self.alive = True
        self.outgoing_bytes = 0
        self.ssd_queued_bytes = 0
        self.on_ssd_queue: Callable[[int], None] = lambda nbytes: None
        """Told of `ssd_queued_bytes` as it changes."""
        self.on_outgoing: Callable[[], None] = lambda: None
        """Told that `outgoing_bytes` has changed."""
        self._wait_ns = wait_ns
        self._leases: dict[Hold, Pool] = {}
        self._watch = aio.Signal(f"{name}.heartbeat")

    # Holding things on other nodes

    @property
    def pools(self) -> tuple[Pool, ...]:
        """One a tier, the fastest first; device pages are their instances'."""
        return (self.pool,) if self.ssd is None else (self.pool, self.ssd)

    def pin_at(self, other: Node, owner: int, blocks: tuple[int, ...], accepts_lossy: bool = True) -> Pin:
        """Pin a prefix in another node's host memory (or here): a lease, alive until it is given back or adopted."""
        self._check_alive()
        pin = other.pool.pin(owner, blocks, leased=other is not self, accepts_lossy=accepts_lossy)
        self._keep(pin, other)
        return pin

    async def reserve_at(self, other: Node, owner: int, count: int, tenant: str = "") -> Reservation:
        """Slots in another node's host memory (or here); waits its turn while the pool is full.

        Raises:
            InstanceDown: either node is dead.
            RequestTooLarge: the whole pool has fewer slots, or the tenant may have fewer of them.
            PoolFull: no room came up in time.
        """
        self._check_alive()
        pool = other.pool
        if count > pool.store.capacity:
            raise RequestTooLarge(owner, f"needs {count} blocks, pool {pool.node} has {pool.store.capacity}")
        if count > pool.room.most(tenant):
            problem = f"needs {count} blocks, of which tenant {tenant} may have {pool.room.most(tenant)} in {pool.node}"
            raise RequestTooLarge(owner, problem)
        if not len(pool.space):  # nobody waits, so whoever finds room need not either
            with suppress(PoolFull):
                reservation = pool.reserve(owner, count, leased=other is not self, tenant=tenant)
                self._keep(reservation, other)
                return reservation
        found: list[Reservation] = []

        def attempt() -> bool | None:
            try:
                found.append(pool.reserve(owner, count, leased=other is not self, tenant=tenant))
            except PoolFull as full:
                return None if full.own else False  # whose share is used up keeps nobody else waiting
            except InstanceDown:
                return True
            return True

        try:
            if not await pool.space.until(attempt, aio.now_ns() + self._wait_ns):
                raise PoolFull(pool.node, count, pool.store.free_slots)
        except BaseException:
            for reservation in found:  # granted, and cancelled before it could be used
                pool.release(reservation)
            raise
        if not found:
            raise InstanceDown(other.name)
        if not self.alive:
            pool.release(found[0])
            raise InstanceDown(self.name)
        self._keep(found[0], other)
        return found[0]

    async def reserve_saved(self, owner: int, count: int, tenant: str = "") -> Reservation:
        """Slots in this node's host memory now, or as soon as what has to leave for them is saved below.

        Raises:
            PoolFull: what nobody holds is not enough, or was not saved in time.
            InstanceDown: the node is dead.
        """
        pool, found = self.pool, list[Reservation]()
        try:
            return pool.reserve(owner, count, tenant=tenant)
        except PoolFull as full:
            if not full.pending:
                raise

        def attempt() -> bool:
            try:
                found.append(pool.reserve(owner, count, tenant=tenant))
            except PoolFull as full:
                if full.pending:
                    return False
                raise
            return True

        try:
            if not await pool.space.until(attempt, aio.now_ns() + min(self._wait_ns, SAVED_NS)):
                raise PoolFull(pool.node, count, pool.store.free_slots)
        except BaseException:
            for reservation in found:  # granted, and cancelled before it could be used
                pool.release(reservation)
            raise
        return found[0]

    def give_back(self, other: Node, hold: Hold) -> None:
        """Release a hold. A dead node cannot: what it held elsewhere ends with its heartbeat."""
        if self.alive:
            other.pool.release(hold)
            self._leases.pop(hold, None)

    def adopt(self, hold: Hold) -> None:
        """A hold that another node made here now belongs to somebody on this node."""
        self.pool.adopt(hold)

    def _check_alive(self) -> None:
        """The dead hold nothing new: nobody would ever give it back, and no heartbeat may keep it."""
        if not self.alive:
            raise InstanceDown(self.name)

    def _keep(self, hold: Hold, other: Node) -> None:
        if hold.expires_ns is not None:
            self._leases[hold] = other.pool
            self._watch.set()
            other._watch.set()

    # Moving bytes

    async def move(self, copy: Copy) -> tuple[bytes, ...]:
        """`perform`, for whom only the checksums of what was read are of interest."""
        return (await self.perform(copy)).checksums

    async def perform(self, copy: Copy) -> CopyResult:
        """Move a span from this node's memory, counting it among what is queued to leave, and at the node's SSD. Raises
        what `TransferEngine.perform` does."""
        source, target, nbytes = copy.source.memory, copy.target.memory, copy.source.nbytes
        leaving = 0 if target.node == self.name else nbytes
        at_ssd = nbytes if source.tier is Tier.SSD or (target.tier is Tier.SSD and not leaving) else 0
        if not (leaving or at_ssd):
            return await self.engine.perform(copy)
        self._queue(leaving, at_ssd)
        try:
            return await self.engine.perform(copy)
        finally:
            self._queue(-leaving, -at_ssd)

    def _queue(self, leaving: int, at_ssd: int) -> None:
        if leaving:
            self.outgoing_bytes += leaving
            self.on_outgoing()
        if at_ssd:
            self.ssd_queued_bytes += at_ssd
            self.on_ssd_queue(self.ssd_queued_bytes)

    # Heartbeat

    async def heartbeat(self) -> None:
        """Renew three times a lease, and expire at once what is overdue; sets no timer while nothing is watched."""
        pool = self.pool  # nobody holds anything on another node's SSD
        while self.alive:
            if not self._leases and pool.next_expiry_ns() is None:
                await self._watch.wait()
            due_ns = aio.now_ns() + pool.lease_ns // 3
            expiry_ns = pool.next_expiry_ns()
            await aio.sleep_until_ns(due_ns if expiry_ns is None else min(due_ns, expiry_ns))
            for hold, other in list(self._leases.items()):
                if hold.released or hold.expires_ns is None:
                    self._leases.pop(hold, None)
                    continue
                try:
                    other.renew(hold)
                except (LeaseLost, InstanceDown):
                    self._leases.pop(hold, None)
            pool.expire()

    def fail(self) -> None:
        self.alive = False
        self._leases.clear()
        for pool in self.pools:
            pool.fail()
