"""Who leaves a tier that is too full: the strategy's order, the watermark's levels, and what must be saved first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from mcjax import aio
from mcjax.errors import PoolFull
from mcjax.kvpool.base import BlockStore, Eviction, Saver, TierReading, Watermark
from mcjax.kvpool.index import BlockIndex
from mcjax.kvpool.quotas import Quota, Shares
from mcjax.types import BlockId

HIT_HISTORY = 256


class Room:
    """Chooses; the pool removes."""

    def __init__(
        self,
        node: str,
        store: BlockStore,
        index: BlockIndex,
        eviction: Eviction,
        watermark: Watermark,
        held: Callable[[], Iterable[tuple[str, int]]] = tuple,
    ):
        """`held` says of tenants how many slots are reserved for them, or lent to them, when counting begins."""
        self.eviction = eviction
        self.saver: Saver | None = None
        """What knows the tier below, where there is one."""
        self.hits: deque[float] = deque(maxlen=HIT_HISTORY)
        self.reading = TierReading(store.capacity, hits=self.hits)
        self._node = node
        self._store = store
        self._index = index
        self._watermark = watermark
        self._held = held
        self.shares: Shares | None = None
        """Who has how much; nobody counts where there are no quotas."""

    @property
    def quotas(self) -> Mapping[str, Quota]:
        """Tenants' floors and ceilings, {} for none; may be replaced at any time."""
        return {} if self.shares is None else self.shares.quotas

    @quotas.setter
    def quotas(self, quotas: Mapping[str, Quota]) -> None:
        """Raises `ConfigError` if the floors together are more than the tier. Counting begins with the first quotas."""
        if self.shares is not None:
            self.shares.quotas = quotas
        elif quotas:
            self.shares = Shares(self._store.capacity, quotas, self._index.slots, self._held())

    def tenant_of(self, block: BlockId) -> str:
        """Whose a resident block is; nobody's (`""`) where nobody counts."""
        return "" if self.shares is None else self.shares.owner(block)

    def most(self, tenant: str) -> int:
        """Slots that a tenant may have at most."""
        return self._store.capacity if self.shares is None else self.shares.most(tenant)

    def leaving(self, count: int, tenant: str) -> list[BlockId]:
        """Blocks to evict now so that `count` slots are free; children come before their parents.

        A tenant that would pass its ceiling gives up blocks of its own first; those of others go only while they have
        more than their floor. Raises `PoolFull` if what may go and nobody holds is not enough, or is not saved yet:
        then saving it has begun.
        """
        store, reading = self._store, self.reading
        capacity, free = store.capacity, store.free_slots
        reading.free, reading.now_ns, reading.saves = free, aio.now_ns(), self.saver is not None
        low, high = self._watermark.levels(reading)
        over = 0 if self.shares is None else max(0, self.shares.over(tenant, count))
        if capacity - free + count <= high * capacity:
            wanted = 0
        else:
            wanted = max(count, capacity - int(low * capacity) + count) if low < 1.0 else count
        if free >= wanted and not over:
            return []
        needed = max(wanted - free, over)
        if self.shares is None:
            victims = self._index.victims(self.eviction.victims(), needed)
        else:
            victims = self._within_quotas(self.shares, tenant, count, over, needed)
        if free + len(victims) < count:
            raise PoolFull(self._node, count, free + len(victims))
        return victims if self.saver is None else self._saved(victims, count, free, over, self.saver)

    def _within_quotas(self, shares: Shares, tenant: str, count: int, over: int, needed: int) -> list[BlockId]:
        """First `over` of the tenant's own, then whatever may go. Raises `PoolFull` if its own are too few."""
        order, index = self.eviction.victims, self._index
        own = index.victims(shares.among_own(order(), tenant), over) if over else []
        if len(own) < over:
            raise PoolFull(self._node, count, max(0, count - over + len(own)), own=True)
        if len(own) == needed:
            return own
        return own + index.victims(order(), needed - len(own), own, shares.evictable(tenant, own))

    def _saved(self, victims: list[BlockId], count: int, free: int, over: int, saver: Saver) -> list[BlockId]:
        """Those that may go now. The others begin to be saved. The first `over` are those without which none may."""
        unsaved = saver.unsaved(victims)
        if not unsaved:
            return victims
        saver.save(unsaved)
        staying = dict.fromkeys(unsaved)
        gone: list[BlockId] = []
        for block in victims:
            if block not in staying:
                gone.append(block)
                continue
            parent = self._index.parent(block)
            if parent is not None:
                staying[parent] = None
        if free + len(gone) < count or gone[:over] != victims[:over]:
            raise PoolFull(self._node, count, free + len(gone), pending=True)
        return gone

    def note_hits(self, share: float) -> None:
        self.hits.append(share)
