"""A node: the host that an instance runs on, with its pool, its way to move bytes, and its heartbeat."""

from __future__ import annotations

from contextlib import suppress

from mcjax import aio
from mcjax.errors import InstanceDown, LeaseLost, PoolFull, RequestTooLarge
from mcjax.kvpool.holds import Hold, Pin, Reservation
from mcjax.kvpool.pool import Pool
from mcjax.transfer.base import Copy
from mcjax.transfer.engine import TransferEngine


class Node:
    """One pool node. It keeps what it holds on *other* nodes alive by heartbeat, and expires what others hold here."""

    def __init__(self, name: str, pool: Pool, engine: TransferEngine, wait_ns: int):
        self.name = name
        self.pool = pool
        self.engine = engine
        self.alive = True
        self.outgoing_bytes = 0
        self._wait_ns = wait_ns
        self._leases: dict[Hold, Pool] = {}
        self._watch = aio.Signal(f"{name}.heartbeat")

    # Holding things on other nodes

    def pin_at(self, other: Node, owner: int, blocks: tuple[int, ...]) -> Pin:
        """Pin a prefix on another node (or here): a lease, kept alive until it is given back or adopted."""
        self._check_alive()
        pin = other.pool.pin(owner, blocks, leased=other is not self)
        self._keep(pin, other)
        return pin

    async def reserve_at(self, other: Node, owner: int, count: int) -> Reservation:
        """Slots on another node (or here); waits its turn while the pool is full.

        Raises:
            InstanceDown: either node is dead.
            RequestTooLarge: the whole pool has fewer slots.
            PoolFull: no room came up in time.
        """
        self._check_alive()
        pool = other.pool
        if count > pool.store.capacity:
            raise RequestTooLarge(owner, f"needs {count} blocks, pool {pool.node} has {pool.store.capacity}")
        if not len(pool.space):  # nobody waits, so whoever finds room need not either
            with suppress(PoolFull):
                reservation = pool.reserve(owner, count, leased=other is not self)
                self._keep(reservation, other)
                return reservation
        found: list[Reservation] = []

        def attempt() -> bool:
            try:
                found.append(pool.reserve(owner, count, leased=other is not self))
            except PoolFull:
                return False
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
        """Move a span from this node's memory, counting it among what is queued to leave."""
        if copy.target.memory.node == self.name:
            return await self.engine.move(copy)
        self.outgoing_bytes += copy.source.nbytes
        try:
            return await self.engine.move(copy)
        finally:
            self.outgoing_bytes -= copy.source.nbytes

    # Heartbeat

    async def heartbeat(self) -> None:
        """Renew three times a lease, and expire at once what is overdue; sets no timer while nothing is watched."""
        pool = self.pool
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
        self.pool.fail()
