"""Who is served next on a path: the highest class, unless a lower one is behind the share that it was promised."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar, cast

from mcjax.errors import ConfigError


class Waiting(Protocol):
    """Something that is served slice by slice."""

    priority: int

    def next_bytes(self) -> int:
        """Of its next slice."""
        ...


W = TypeVar("W", bound=Waiting)


class ClassQueue(Generic[W]):
    """Classes in strict order, with shares; within a class, in turn, a slice each.

    A class of `shares` that waits is owed its share of every byte served meanwhile, and goes first as soon as it is
    owed a slice. So while it waits it gets its share, less one slice of each such class; what a class does not use is
    nobody's loss. This is deficit round robin (Shreedhar and Varghese, 1995) for the promised part of a path, strict
    priority for the rest.
    """

    def __init__(self, shares: Mapping[int, float] | None = None):
        self._shares = dict(sorted((shares or {}).items(), reverse=True))
        self._owed = dict.fromkeys(self._shares, 0.0)
        self._classes: dict[int, deque[W]] = {}
        self._priorities: list[int] = []
        """Classes that have ever waited, the highest first."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, entry: W) -> None:
        """Wait behind those of the same class."""
        line = self._classes.get(entry.priority)
        if line is None:
            line = self._classes[entry.priority] = deque()
            self._priorities = sorted(self._classes, reverse=True)
        line.append(entry)
        self._count += 1

    def peek(self) -> W | None:
        """Whoever is to be served one slice now; None if nobody waits."""
        for priority, owed in self._owed.items():
            line = self._classes.get(priority)
            if line and owed >= line[0].next_bytes():
                return line[0]
        for priority in self._priorities:
            line = self._classes[priority]
            if line:
                return line[0]
        return None

    def take(self) -> W | None:
        """The same, out of the queue, and its slice counted. Who has more is pushed again."""
        entry = self.peek()
        if entry is not None:
            self._classes[entry.priority].popleft()
            self._count -= 1
            if self._owed:
                self._account(entry.priority, entry.next_bytes())
        return entry

    def discard(self, entry: W) -> None:
        """Whoever gives up waiting; harmless for who does not wait."""
        line = self._classes.get(entry.priority)
        if line and entry in line:
            line.remove(entry)
            self._count -= 1
            if not line and entry.priority in self._owed:
                self._owed[entry.priority] = 0.0

    def _account(self, served: int, nbytes: int) -> None:
        for priority, share in self._shares.items():
            waits = priority == served or self._classes.get(priority)
            owed = self._owed[priority] + share * nbytes if waits else 0.0
            if priority == served:
                owed = max(0.0, owed - nbytes)
            self._owed[priority] = owed


def read_shares(key: str, value: object) -> dict[int, float]:
    """Shares by class, as a config has them; none where it has None. Raises `ConfigError` for what cannot be."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(key, value, "must be a mapping from classes to parts of 1, such as {0: 0.1}")
    shares, found = cast("Mapping[object, object]", value), dict[int, float]()
    for name, share in shares.items():
        try:
            priority = int(str(name))
        except ValueError:
            raise ConfigError(f"{key}.{name}", share, "a class is a whole number, the priority of requests") from None
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(f"{key}.{name}", share, "must be more than 0 and at most 1: a part of each path")
        found[priority] = float(share)
    if math.fsum(found.values()) > 1 + 1e-9:
        raise ConfigError(key, dict(shares), "together must not be more than 1")
    return found
