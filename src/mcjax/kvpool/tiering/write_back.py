"""Write blocks down in the background, once many are not below yet."""

from __future__ import annotations

from dataclasses import dataclass

from mcjax.errors import ConfigError


@dataclass(frozen=True)
class WriteBack:
    """While more than a share `unsaved` of the tier is not below, those next in the order of eviction go down ahead of
    need; so that room is rarely waited for, and a block that goes soon after it came is written only if it must be.

    `exclusive`: what is promoted leaves the tier below.
    """

    unsaved: float = 0.5
    exclusive: bool = False
    must_save: bool = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.unsaved <= 1.0:
            raise ConfigError("kvpool.tiering.unsaved", self.unsaved, "must be a share, from 0 to 1")

    def at_insert(self) -> bool:
        return False

    def at_hit(self, hits: int) -> bool:
        return False

    def ahead(self, unsaved: int, capacity: int) -> int:
        return max(0, unsaved - int(self.unsaved * capacity))
