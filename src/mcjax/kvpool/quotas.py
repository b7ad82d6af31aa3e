"""Tenants' shares of a tier: what each is sure of (a floor), may take at most (a ceiling), and has."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from mcjax.errors import ConfigError, IntegrityError
from mcjax.types import BlockId

KEY = "kvpool.tenants"


@dataclass(frozen=True, slots=True)
class Quota:
    """Shares of a tier's capacity, from 0 to 1."""

    floor: float = 0.0
    """While a tenant has no more than this, its blocks are not evicted for others."""
    ceiling: float = 1.0
    """Beyond this, it makes room among its own blocks."""


def parse_quotas(tenants: Mapping[str, object]) -> dict[str, Quota]:
    """The config's `{tenant: {floor: 0.2, ceiling: 0.8}}`. Raises `ConfigError` naming the key that cannot work."""
    parsed: dict[str, Quota] = {}
    for name, shares in tenants.items():
        key, known = f"{KEY}.{name}", ("floor", "ceiling")
        if not isinstance(shares, Mapping):
            raise ConfigError(key, shares, "must be a mapping like {floor: 0.2, ceiling: 0.8}")
        given: dict[str, float] = {}
        for word, share in cast("Mapping[str, object]", shares).items():
            if word not in known:
                raise ConfigError(f"{key}.{word}", share, "unknown key", known)
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 <= share <= 1.0:
                raise ConfigError(f"{key}.{word}", share, "must be a share of the tier, from 0 to 1")
            given[word] = float(share)
        quota = Quota(**given)
        if quota.floor > quota.ceiling:
            raise ConfigError(f"{key}.floor", quota.floor, f"is above the tenant's ceiling of {quota.ceiling}")
        if quota.ceiling == 0.0:
            raise ConfigError(f"{key}.ceiling", quota.ceiling, "leaves the tenant no room at all; it must be above 0")
        parsed[str(name)] = quota
    check_quotas(parsed)
    return parsed


def check_quotas(quotas: Mapping[str, Quota]) -> None:
    """Raises `ConfigError` unless all floors can be kept at once."""
    total = sum(quota.floor for quota in quotas.values())
    if total > 1.0 + 1e-9:  # 0.7 + 0.2 + 0.1 is a little more than 1
        named = ", ".join(f"{name} {quota.floor}" for name, quota in quotas.items() if quota.floor)
        raise ConfigError(KEY, round(total, 6), f"the floors together are more than the whole tier ({named})")


class Shares:
    """Who has how much of one tier: blocks, and slots reserved or lent. Exists only where there are quotas.

    A block belongs to the tenant whose reservation committed it. What was resident or lent before counting began is
    nobody's (`""`), and so is a slot whose block left the index while it was pinned, until it is free.
    """

    def __init__(
        self,
        capacity: int,
        quotas: Mapping[str, Quota],
        blocks: Iterable[BlockId] = (),
        held: Iterable[tuple[str, int]] = (),
    ):
        """Counting begins with what is there: resident `blocks`, and slots `held` by tenants. Raises `ConfigError` like
        `check_quotas`."""
        self._capacity = capacity
        self._owners: dict[BlockId, str] = dict.fromkeys(blocks, "")
        self._lent: dict[int, str] = {}
        self._used: dict[str, int] = {"": len(self._owners)}
        for tenant, count in held:
            self.take(tenant, count)
        self.quotas = quotas

    @property
    def quotas(self) -> Mapping[str, Quota]:
        return self._quotas

    @quotas.setter
    def quotas(self, quotas: Mapping[str, Quota]) -> None:
        """Other quotas from now on: who is above a new ceiling makes room as it next asks for some."""
        check_quotas(quotas)
        capacity = self._capacity
        self._quotas = quotas
        self._floors = {name: int(quota.floor * capacity) for name, quota in quotas.items()}
        self._ceilings = {name: max(1, int(quota.ceiling * capacity)) for name, quota in quotas.items()}

    def used(self, tenant: str) -> int:
        """Slots that a tenant has."""
        return self._used.get(tenant, 0)

    def most(self, tenant: str) -> int:
        """Slots that it may have at most."""
        return self._ceilings.get(tenant, self._capacity)

    def owner(self, block: BlockId) -> str:
        return self._owners[block]

    # Counting

    def take(self, tenant: str, count: int) -> None:
        self._used[tenant] = self._used.get(tenant, 0) + count

    def give_back(self, tenant: str, count: int) -> None:
        self._used[tenant] -= count

    def lend(self, tenant: str, slots: Iterable[int]) -> None:
        lent = dict.fromkeys(slots, tenant)
        self._lent.update(lent)
        self.take(tenant, len(lent))

    def returned(self, slots: Iterable[int]) -> None:
        """Lent slots have come back."""
        for slot in slots:
            self._used[self._lent.pop(slot, "")] -= 1

    def kept(self, slots: Sequence[int], tenant: str) -> None:
        """Lent slots are to hold blocks of `tenant`."""
        self.returned(slots)
        self.take(tenant, len(slots))

    def own(self, blocks: Iterable[BlockId], tenant: str) -> None:
        """Slots that `tenant` has hold these blocks now."""
        self._owners.update(dict.fromkeys(blocks, tenant))

    def left(self, blocks: Iterable[BlockId]) -> None:
        """Blocks have left the tier."""
        owners, used = self._owners, self._used
        for block in blocks:
            used[owners.pop(block)] -= 1

    # Choosing

    def over(self, tenant: str, count: int) -> int:
        """Of its own blocks so many must go before it has `count` slots more."""
        return self.used(tenant) + count - self.most(tenant)

    def among_own(self, order: Iterator[BlockId], tenant: str) -> Iterator[BlockId]:
        """Those of `order` that belong to `tenant`."""
        owners = self._owners
        return (block for block in order if owners[block] == tenant)

    def evictable(self, tenant: str, already: Sequence[BlockId]) -> Evictable:
        """What may be evicted for `tenant`, besides blocks of its own that are chosen `already`."""
        return Evictable(self._owners, self._spare(tenant), dict.fromkeys(already))

    def _spare(self, tenant: str) -> dict[str, int]:
        """How many blocks of each tenant may go. Its own are all its to give."""
        spare = {name: max(0, used - self._floors.get(name, 0)) for name, used in self._used.items()}
        spare[tenant] = self.used(tenant)
        return spare

    def check_integrity(
        self, name: str, blocks: Collection[BlockId], held: Iterable[tuple[str, int]], lent: int
    ) -> None:
        """Raise `IntegrityError` unless the counts are those of the resident `blocks`, and of the slots that are `held`
        by tenants or `lent`."""
        if self._owners.keys() != set(blocks):
            raise IntegrityError(f"{name}: blocks have owners that are gone, or none")
        nobodys = lent - len(self._lent)
        if nobodys < 0:
            raise IntegrityError(f"{name}: {lent} slots are lent, {len(self._lent)} have a tenant")
        used: dict[str, int] = {"": nobodys}
        for tenant, count in (*held, *((owner, 1) for owner in (*self._owners.values(), *self._lent.values()))):
            used[tenant] = used.get(tenant, 0) + count
        counted = {tenant: count for tenant, count in self._used.items() if count}
        if counted != {tenant: count for tenant, count in used.items() if count}:
            raise IntegrityError(f"{name}: tenants have {used}, {counted} is counted")


class Evictable:
    """Says of block after block whether it may be evicted as well, and counts those that it said yes to."""

    def __init__(self, owners: Mapping[BlockId, str], spare: dict[str, int], already: Mapping[BlockId, None]):
        self._owners = owners
        self._spare = spare
        self._already = already

    def __call__(self, block: BlockId) -> bool:
        if block in self._already:
            return False
        owner = self._owners[block]
        if self._spare[owner] <= 0:
            return False
        self._spare[owner] -= 1
        return True
